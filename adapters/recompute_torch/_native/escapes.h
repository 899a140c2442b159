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

// An address gets out of the dispatcher: who has it may write there at any time. So the value is a source, what was made
// from it before no longer depends on it. What is made from it afterwards is made again from a copy, as above.

void escaped(StorageImpl* storage) {
  own(storage);
  Value* v = value_of(storage);
  if (!v) return;
  v->escaped = true;
  leave_pool(v);
}

// An array came to be on it while a kernel of another thread had just used up the notice (see `arm`).
bool has_been_shared(StorageImpl* storage, Value* v) {
  if (C10_LIKELY(storage->resizable()) || v->unshared) return false;
  v->escaped = true;
  leave_pool(v);
  return true;
}

// Torch calls it once, before it gives an address that may be written to.
void on_escape(StorageImpl* storage) {
  if (inside && !in_code_of_others) return;  // a kernel has asked
  Lock lock;
  Value* v = value_of(storage);
  if (!v || (in_code_of_others && v->pins)) return;  // what is kept of an argument is seen to at the end
  Raised here(lenient);
  if (v->blank && c10::impl::tls_is_dispatch_key_excluded(DispatchKey::Python)) {  // `torch.tensor` fills what is new
    drop_call(v);
    v->blank = false;
    bury();
    return;
  }
  escaped(storage);
}

void unmap(void* context) {  // memory at reserved addresses
  Lock lock;
  auto* piece = static_cast<std::pair<void*, size_t>*>(context);
  addresses.empty(piece->first, piece->second);
  delete piece;
}

bool bring_to_where_it_was_read(uintptr_t address) {
  Lock lock;
  const auto found = addresses.at(address);
  if (!found) return false;
  Value* v = *found;
  if (!v) return true;  // another thread has read there, too, and was faster
  M.faults++;
  Raised here(lenient);
  Pinned pinned;
  pinned.add(v);
  void* range = std::exchange(v->range, nullptr);  // the addresses stay: the instruction will run again
  try {
    bring(v);
  } catch (const std::exception& error) {
    fprintf(stderr, "recompute: an evicted tensor cannot be brought back: %s\n", error.what());
    return false;
  }
  if (!addresses.fill(range, v->data.get(), v->bytes)) return false;
  v->data = Bytes(DataPtr(range, new std::pair<void*, size_t>(range, v->bytes), &unmap, at::Device(at::kCPU)), v->bytes);
  v->impl->_mutable_data_ptr_no_checks().release_context();
  wrap(v, v->impl);
  escaped(v->impl);  // what has read once may read again
  return true;
}

struct sigaction handler_before {};

void on_fault(int number, siginfo_t* info, void* context) {
  const int error = errno;
  if (bring_to_where_it_was_read(uintptr_t(info->si_addr))) {
    errno = error;
    return;
  }
  if (handler_before.sa_flags & SA_SIGINFO) return handler_before.sa_sigaction(number, info, context);
  sigaction(SIGSEGV, &handler_before, nullptr);  // the instruction runs again, and the fault goes its way
}

bool handles_faults() {
  struct sigaction now {};
  sigaction(SIGSEGV, nullptr, &now);
  return (now.sa_flags & SA_SIGINFO) && now.sa_sigaction == &on_fault;
}

// On the stack of the thread: others install a small one of their own, on which no kernel could run.
void watch_faults() {
  if (handles_faults()) return;
  struct sigaction ours {};
  ours.sa_sigaction = &on_fault;
  ours.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &ours, &handler_before);
}

void unwatch_faults() {
  if (handles_faults()) sigaction(SIGSEGV, &handler_before, nullptr);
}
