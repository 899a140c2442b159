// A call runs again, on tensors that are made of its recipe, below autograd, autocast, functorch and every mode.

// An operator runs below the fallback. What one of torch's own calls in turn is not ours to see. Code of others may use
// tensors that are no arguments of it, which must be in memory and stay there: its operators come by, and are `nested`.
thread_local bool in_code_of_others = false;
thread_local int nested = 0;

struct Running {
  const OperatorHandle* const before = running;
  const bool was = in_code_of_others;
  const bool own;
  std::optional<c10::impl::ExcludeDispatchKeyGuard> off;
  explicit Running(const OperatorHandle* op, bool own = true) : own(own) {
    inside++;
    nested += !own;
    in_code_of_others = !own;
    if (op) running = op;
    if (own) off.emplace(KEY);
  }
  ~Running() {
    inside--;
    nested -= !own;
    in_code_of_others = was;
    running = before;
  }
  Running(const Running&) = delete;
};

const DispatchKeySet& above_operators() {
  static const DispatchKeySet keys = c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
      DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::PythonDispatcher,
          DispatchKey::PreDispatch, DispatchKey::Functionalize, DispatchKey::Tracer, DispatchKey::FuncTorchBatched,
          DispatchKey::FuncTorchVmapMode, DispatchKey::FuncTorchGradWrapper, DispatchKey::Batched, DispatchKey::VmapMode,
          DispatchKey::FuncTorchDynamicLayerBackMode, DispatchKey::FuncTorchDynamicLayerFrontMode});
  return keys;
}

at::Generator generator_of(c10::ArrayRef<IValue> arguments) {
  for (const IValue& argument : arguments)
    if (argument.isGenerator()) return argument.toGenerator();
  return at::detail::getDefaultCPUGenerator();
}

struct Drawing {  // a generator is in an earlier state while this exists
  at::Generator generator;
  at::Tensor now;
  Drawing(const Call* call) {
    if (!call->state.defined()) return;
    Raised own(bookkeeping);
    generator = generator_of(call->arguments);
    now = generator.get_state();
    generator.set_state(call->state);
  }
  ~Drawing() {
    if (now.defined()) generator.set_state(now);
  }
};

struct DefaultType {  // of a quotient of integers, say
  const caffe2::TypeMeta now = c10::get_default_dtype();
  bool differs;
  explicit DefaultType(caffe2::TypeMeta then) : differs(then != now) {
    if (differs) c10::set_default_dtype(then);
  }
  ~DefaultType() {
    if (differs) c10::set_default_dtype(now);
  }
};

DataPtr copied(Value* v) {
  DataPtr to = c10::GetCPUAllocator()->allocate(v->bytes);
  std::memcpy(to.get(), v->data.get(), v->bytes);
  return to;
}

at::Tensor tensor_on(const Given& g, const c10::intrusive_ptr<StorageImpl>& storage) {
  auto tensor = at::detail::make_tensor<TensorImpl>(c10::Storage(storage), g.keys, g.dtype);
  const size_t n = g.shape.size() / 2;
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides({g.shape.data(), n}, {g.shape.data() + n, n}, g.offset);
  if (g.number) tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

template <class F>
void each_tensor(const IValue& value, int position, F&& f) {
  if (value.isTensor()) {
    f(value.unsafeToTensorImpl(), position, -1);
  } else if (value.isList()) {
    int item = 0;
    for (const IValue& element : value.toListRef()) {
      if (element.isTensor()) f(element.unsafeToTensorImpl(), position, item);
      item++;
    }
  }
}

bool is_undefined(const TensorImpl* t) { return t == static_cast<TensorImpl*>(c10::UndefinedTensorImpl::singleton()); }

bool ordinary(const TensorImpl* t) {  // nothing but geometry on memory of the CPU
  static const DispatchKeySet strange =
      DispatchKeySet({DispatchKey::Python, DispatchKey::FuncTorchBatched, DispatchKey::ZeroTensor,
          DispatchKey::FuncTorchGradWrapper, DispatchKey::Functionalize, DispatchKey::NestedTensor, DispatchKey::Sparse,
          DispatchKey::SparseCsr, DispatchKey::Quantized, DispatchKey::MkldnnCPU}) &
      DispatchKeySet(DispatchKeySet::FULL);
  const auto keys = t->key_set();
  return t->has_storage() && keys.has(DispatchKey::CPU) && !keys.has_any(strange);
}

void repeat(Call* call) {  // its arguments are in memory and pinned
  c10::SmallVector<c10::intrusive_ptr<StorageImpl>, 8> storages;
  c10::SmallVector<c10::intrusive_ptr<StorageImpl>, 1> targets;  // what it writes to: copies
  Running below(&call->op, call->rule->own);
  c10::impl::ExcludeDispatchKeyGuard off(above_operators());
  at::AutoGradMode grad(call->grad);
  for (uint32_t which : call->written) {
    Value* v = call->given[which].value;
    targets.push_back(storage_of_our_own(v->bytes, copied(v)));
  }
  Stack stack(call->arguments);
  for (uint16_t position : call->rule->tensors)
    if (stack[position].isList()) stack[position] = stack[position].toList().copy();  // IValues share their lists
  for (Given& g : call->given) {
    c10::intrusive_ptr<StorageImpl> storage;
    for (size_t i = 0; i < targets.size() && !storage; i++)
      if (call->given[call->written[i]].value == g.value) storage = targets[i];
    if (!g.value) {
      storage = storage_of_our_own(0);
    } else if (!storage) {
      storage = storage_of(g.value);
      if (!storage && !g.value->impl) give_storage(g.value);  // a source whose storage is gone
      if (!storage) storage = storage_of(g.value);
    }
    if (g.item < 0) stack[g.position] = tensor_on(g, storage);
    else stack[g.position].toList().set(g.item, tensor_on(g, storage));
  }
  {
    DefaultType type(call->default_dtype);
    Drawing drawing(call);
    const uint64_t began = ticks();
    call->op.redispatchBoxed(call->keys, &stack);
    const uint64_t took = ticks() - began;
    M.repeated_ticks += took, call->rule->repeated_ticks += took;
    M.clock += took;
    call->cost = std::min(call->cost, took);  // the first run may fill caches, or be interrupted
    M.repeats++, call->rule->repeats++;
    if (C10_UNLIKELY(M.repeats == M.patience)) count.beside = count.used() + M.live;
  }
  size_t number = 0;
  const auto take = [&](StorageImpl* storage) {
    Value* v = number < call->outputs.size() ? call->outputs[number] : nullptr;
    number++;
    if (!v || v->resident()) return;
    TORCH_CHECK(storage->nbytes() == v->bytes, "recompute: ", call->rule->name, " made another size when it ran again");
    auto& pointer = storage->_mutable_data_ptr_no_checks();
    DataPtr data = std::move(pointer);
    pointer.clear();
    receive(v, std::move(data));
  };
  c10::SmallVector<StorageImpl*, 4> seen;
  for (auto& target : targets) take(target.get()), seen.push_back(target.get());
  for (const IValue& output : stack)
    each_tensor(output, 0, [&](TensorImpl* t, int, int) {
      if (is_undefined(t) || !ordinary(t)) return;
      StorageImpl* storage = t->unsafe_storage().unsafeGetStorageImpl();
      if (value_of(storage) || !storage->nbytes() || std::find(seen.begin(), seen.end(), storage) != seen.end()) return;
      seen.push_back(storage), take(storage);
    });
}

// Bring all of these into memory, pinned by the caller. With a stack of its own, since histories are long.
void bring(c10::ArrayRef<Value*> all, Pinned& pinned) {
  struct Frame {
    Call* call;                           // none: the outermost, which is for the caller
    Value* wanted;                        // of which it is the call
    c10::SmallVector<Value*, 6> needs;
    Pinned own;
    Pinned* pinned = &own;
    bool ready = false;                   // all that it needs is there, and pinned
    size_t gave_up = 0;                   // so often its pins were given up for a call that it waits for
  };
  std::vector<std::unique_ptr<Frame>> frames;
  Held held;
  for (Value* v : all) held.add(v);
  // There is no room for the call on top: the outermost that waits for it lets go of what it has pinned, which is
  // brought again later. With k values it does so k + 1 times, so every order that could help has had its turn.
  // All orders of a deep stack are more than anybody waits for: at last what is needed again stays, and that is it.
  const int64_t enough = M.repeats + 32 * M.calls + 10000;
  const auto give_up_pins = [&] {
    if (M.repeats > enough) return false;
    for (size_t i = 0; i + 1 < frames.size(); i++) {
      Frame& frame = *frames[i];
      const auto& values = frame.pinned->values;
      const bool helps = std::any_of(values.begin(), values.end(), [](Value* v) { return v->resident(); });
      if (!helps || frame.gave_up > frame.needs.size()) continue;
      frame.gave_up++;
      Held last;
      last.add(frames[i + 1]->wanted);
      frame.pinned->release();
      frame.pinned->add(frames[i + 1]->wanted);
      return true;
    }
    return false;
  };
  const auto push = [&](Value* v) {
    TORCH_CHECK(v->call, "recompute: a source has lost its memory");
    auto frame = std::make_unique<Frame>();
    frame->call = v->call;
    frame->wanted = v;
    for (const Given& g : v->call->given) {
      if (!g.value) continue;
      g.value->used = M.clock;  // looks recent, so that it stays if it can, but is not pinned yet
      frame->needs.push_back(g.value);
    }
    frames.push_back(std::move(frame));
  };
  frames.push_back(std::make_unique<Frame>());
  frames.back()->needs.append(all.begin(), all.end());
  frames.back()->pinned = &pinned;
  while (true) {
    run_handlers();
    look_at_repeats();
    Frame& top = *frames.back();
    if (top.call && top.wanted->resident()) {  // an operator in a handler has brought it, and may have ended its call
      frames.pop_back();
      continue;
    }
    Value* missing = nullptr;  // what is made for this call stays; what is there may go again until the call runs
    for (Value* v : top.needs)
      if (!top.ready && !v->resident()) {
        missing = v;
        break;
      }
    if (missing) {
      if (C10_UNLIKELY(M.repeats > enough))
        for (Value* v : top.needs)
          if (v->resident() && !std::count(top.pinned->values.begin(), top.pinned->values.end(), v)) top.pinned->add(v);
      top.pinned->add(missing);
      push(missing);
      continue;
    }
    if (!std::exchange(top.ready, true))
      for (Value* v : top.needs) top.pinned->add(v);
    if (!top.call) return;
    try {
      repeat(top.call);
    } catch (const NoRoom&) {
      if (!give_up_pins()) throw;
      was_short = false;
      continue;
    }
    TORCH_CHECK(top.wanted->resident(), "recompute: a call that ran again did not make what it made before");
    frames.pop_back();
  }
}

void bring(Value* wanted) {  // it is pinned by the caller
  if (wanted->resident()) return;
  Pinned pinned;
  bring(c10::ArrayRef<Value*>(wanted), pinned);
}
