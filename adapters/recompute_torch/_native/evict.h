// Memory leaves a value, and comes back. The storage keeps its size, and everything that refers to it.

constexpr size_t FIRST_USERS = 16;

void neighbours_changed(Value* v) {  // it has been evicted, or is back: the values next to it cost more, or less
  M.changes++;
  for (const Given& g : v->call->given)
    if (g.value) g.value->known = 0;
  const size_t users = std::min(v->users.size(), FIRST_USERS);
  for (size_t u = 0; u < users; u++)
    for (Value* out : v->users[u].call->outputs)
      if (out) out->known = 0;
}

bool has_been_shared(StorageImpl*, Value*);

void evict(Value* v) {
  const auto storage = storage_of(v);
  if (!storage) return;  // it has gone
  if (C10_UNLIKELY(has_been_shared(storage.get(), v))) return;
  leave_pool(v);
  neighbours_changed(v);
  M.evictions++;
  count.evicted += int64_t(v->bytes);
  if (v->own) {
    v->data.clear();  // else it could stay as a released one that is wanted
    show_in(v, nullptr);
    auto last = std::move(v->own);  // `own_gone` does the rest
    return;
  }
  M.missing += v->bytes;
  auto& pointer = v->impl->_mutable_data_ptr_no_checks();
  const auto device = pointer.device();
  pointer.release_context();
  if (guard == Guard::FAULT) v->range = addresses.take(v, v->bytes);
  pointer = DataPtr(v->range, v, &storage_gone, device);
  protect(v->impl, v->range != nullptr);
  v->data.clear();
  v->chain = chain_of(v);
  update_needed(v);
}

c10::intrusive_ptr<StorageImpl> storage_of_our_own(size_t bytes, DataPtr data = DataPtr()) {
  return c10::make_intrusive<StorageImpl>(
      StorageImpl::use_byte_size_t(), bytes, std::move(data), c10::GetCPUAllocator(), true);
}

void give_storage(Value* v) {  // the program's is gone
  v->own = storage_of_our_own(v->bytes);
  wrap(v, v->own.get());
  v->refs++;
}

void receive(Value* v, DataPtr&& data) {  // memory from a repeat
  const auto storage = storage_of(v);
  forget_missing(v);
  v->data = Bytes(std::move(data));
  v->used = M.clock;
  neighbours_changed(v);
  if (storage) {
    v->impl->_mutable_data_ptr_no_checks().release_context();
    unprotect(v->impl);
    wrap(v, v->impl);
    arm(v->impl);
    unreserve(v);
  } else {
    give_storage(v);
  }
  update_needed(v);
  enter_pool(v);
}
