// Memory that others may write to at any time: an array of NumPy, what another process shares, a tensor whose address was
// asked for. A recipe reads a copy of it, which goes with the last recipe that does. At each further use the copy is
// compared with what is there now: if that has changed, it is another value.

constexpr size_t COPIED = size_t(1) << 26;  // bytes: of more there is no copy, and what is made from it is made once
constexpr uintptr_t ALIGNED = 16;           // bytes: nor of memory that kernels read in other steps than its copy

struct Copy {
  c10::weak_intrusive_ptr<StorageImpl> of;
  Value* value;
};
std::unordered_map<StorageImpl*, Copy>& copies = *new std::unordered_map<StorageImpl*, Copy>;

void forget_copy(Value* v) {  // for its recipes it stays, if it is worth that
  if (v->users.empty()) unref(v);
  else M.orphans.push_back(v);
}

void forget_copies_of_the_dead() {
  for (auto it = copies.begin(); it != copies.end();) {
    if (!it->second.of.expired()) {
      ++it;
      continue;
    }
    Value* v = it->second.value;
    it = copies.erase(it);
    forget_copy(v);
  }
}

void forget_all_copies() {
  std::vector<Value*> last;
  for (auto& [storage, copy] : copies) last.push_back(copy.value);
  copies.clear();
  for (Value* v : last) unref(v);
}

Value* copy_of(StorageImpl* storage) {  // none: it is too large, or there is no room
  static size_t many = 64;
  const void* there = storage->_mutable_data_ptr_no_checks().get();
  const size_t bytes = storage->nbytes();
  if (!there || bytes > COPIED || reinterpret_cast<uintptr_t>(there) % ALIGNED) return nullptr;
  auto known = copies.find(storage);
  if (known != copies.end()) {
    Value* v = known->second.value;
    if (v->resident() && v->bytes == bytes && !std::memcmp(v->data.get(), there, bytes)) return v;
    copies.erase(known);
    forget_copy(v);
  } else if (copies.size() >= many) {
    forget_copies_of_the_dead();
    many = 2 * copies.size() + 64;
  }
  if (!evict_until_there_is_room(bytes)) return nullptr;
  DataPtr memory = c10::GetCPUAllocator()->allocate(bytes);
  std::memcpy(memory.get(), there, bytes);
  Value* v = new_value(bytes);
  v->data = Bytes(std::move(memory));
  v->refs = 1;
  copies.emplace(storage, Copy{c10::weak_intrusive_ptr<StorageImpl>(
      c10::intrusive_ptr<StorageImpl>::reclaim_copy(storage)), v});
  return v;
}
