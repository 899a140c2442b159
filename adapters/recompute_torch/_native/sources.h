// Sources: values that stay. What was made from one could not be made again once it is written, so that is seen to
// before. And what a history is worth: sources that only calls need go when what depends on them takes no more memory.

thread_local bool stepping = false;  // an optimizer makes its step: nothing is remembered of it
thread_local int spans = 0;          // of profilers, in that step

void set_stepping(bool on) { stepping = on, spans = 0; }

void see_span(int change) {  // the step's own one ends by an error, too
  if (stepping && (spans += change) < 0) set_stepping(false);
}

bool quiet() { return stepping && !c10::GradMode::is_enabled(); }  // its closure, if it has one, is a step like others

void fix(Value* v) {  // a source from now on; it is held by the caller
  if (!v->call) return;
  Pinned pinned;
  pinned.add(v);
  bring(v);
  drop_call(v);
  v->blank = false;
  bury();
  if (v->own && v->users.empty()) auto last = std::move(v->own);  // another thread let its storage go meanwhile
}

// What is alive of all that was made from a value; false: after `most` calls there is still more.
bool dependents(Value* of, Held& alive, int64_t& bytes, size_t most) {
  const uint64_t walk = ++M.walks;
  std::vector<Value*> path{of};
  size_t calls = 0;
  of->seen = walk;
  for (size_t i = 0; i < path.size(); i++)
    for (const Use& use : path[i]->users) {
      if (use.call->seen == walk) continue;
      use.call->seen = walk;
      if (++calls > most) return false;
      for (Value* out : use.call->outputs) {
        if (!out || out->seen == walk) continue;
        out->seen = walk;
        path.push_back(out);
        if (out->alive()) alive.add(out), bytes += out->bytes;
      }
    }
  return true;
}

// Keep a copy of a source for the calls that need it; the storage has a value of its own.
void part(Value* v) {
  Bytes copy{copied(v)};
  Value* next = new_value(v->bytes);
  next->data = std::move(v->data);
  v->impl->_mutable_data_ptr_no_checks().release_context();
  wrap(next, v->impl);
  next->refs = 1;
  next->escaped = v->escaped;
  next->unshared = v->unshared;
  v->data = std::move(copy);
  show_in(v, nullptr);
  v->escaped = false;
  M.orphans.push_back(v);  // with the reference that the storage had
}

bool try_to_fix(const Held& held) {  // false: there was no room for all of them
  try {
    for (Value* v : held.values)
      if (v->alive()) fix(v);
    return true;
  } catch (const NoRoom&) {
    was_short = false;
    return false;
  }
}

// What a storage holds is about to be written: its value becomes a source on which nothing depends.
//
// In a step of an optimizer what is alive of that (gradients, losses) is kept for good, and all that led to it is
// forgotten, so a training remembers one step. Elsewhere a copy of the source is kept instead, if that is smaller.
void own(StorageImpl* storage) {
  Value* v = value_of(storage);
  if (!v) return;
  Pinned pinned;
  pinned.add(v);
  fix(v);
  v->blank = false;
  if (!v->users.empty()) {
    Held alive;
    int64_t bytes = 0;
    if (dependents(v, alive, bytes, SIZE_MAX) && (quiet() || bytes <= int64_t(v->bytes))) try_to_fix(alive);
    for (Value* other : M.kept) M.orphans.push_back(other);  // fewer depend on them now
    M.kept.clear();
  }
  if (!v->users.empty()) part(v);
}

void tidy() {
  constexpr size_t LOOK = 256;  // calls
  static size_t many = 64;
  for (size_t n = M.orphans.size(); n && !M.orphans.empty(); n--) {
    Value* v = M.orphans.front();
    M.orphans.pop_front();
    Held held;
    held.add(v);
    unref(v);
    if (v->call || v->alive() || v->users.empty()) continue;
    Held alive;
    int64_t bytes = 0;
    if (dependents(v, alive, bytes, LOOK) && bytes <= int64_t(v->bytes) && try_to_fix(alive)) continue;
    v->refs++;
    M.kept.push_back(v);
  }
  if (M.kept.size() > many) {
    M.orphans.swap(M.kept);
    many = 2 * M.orphans.size() + 64;
  }
}

bool commit() {  // forget how everything was made; false: there was no room for all of it
  Held held;
  for (Value* v = M.all.after; v != &M.all; v = v->after)
    if (v->alive() && v->call) held.add(v);
  return try_to_fix(held);
}
