// An address gets out of the dispatcher: who has it may write there at any time. So the value is a source, what was made
// from it before no longer depends on it. What is made from it afterwards is made again from a copy: outside.h.

void escaped(StorageImpl* storage) {
  own(storage);
  Value* v = value_of(storage);
  if (!v) return;
  v->escaped = true;
  leave_pool(v);
}

struct Lenient {  // an error cannot come out of here, and the content must: what is too much is said in `overshoot`
  Lenient() { lenient++; }
  ~Lenient() { lenient--; }
};

// Torch calls it once, before it gives an address that may be written to.
void on_escape(StorageImpl* storage) {
  if (inside && !in_code_of_others) return;  // a kernel has asked
  Lock lock;
  Value* v = value_of(storage);
  if (!v || (in_code_of_others && v->pins)) return;  // what is kept of an argument is seen to at the end
  Lenient here;
  if (v->blank && c10::impl::tls_is_dispatch_key_excluded(DispatchKey::Python)) {  // `torch.tensor` fills what is new
    drop_call(v);
    v->blank = false;
    bury();
    return;
  }
  M.escapes++;
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
  Value* v = addresses.at(address);
  if (!v) return false;
  M.faults++;
  Lenient here;
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
