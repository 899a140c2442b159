// How a call comes: in boxes on a stack, or, for the commonest operators, as it was written.
//
// A box refers to its tensor. Where that is the second reference to a tensor that Python has, torch takes the
// interpreter's lock to count it, and again when the box goes. For a small operator that is half of what tracking costs.

struct Met {  // a tensor among the arguments
  TensorImpl* tensor;
  int16_t position, item;
  Value* value;  // none: it has no bytes
  StorageImpl* storage;
  uint32_t references;
  bool outside;  // others may write to its memory: a recipe reads a copy
};

class Form {
 public:
  using Each = c10::function_ref<void(TensorImpl*, int position, int item)>;  // item: in a list; -1: it is in none
  Form() = default;
  Form(const Form&) = delete;
  virtual void each_argument(Each) const = 0;
  virtual void each_output(Each) const = 0;  // after `run`
  virtual bool is_training() const = 0;      // as batch norm's argument says; running statistics are written then
  virtual void remember(std::vector<IValue>& into, c10::ArrayRef<Met> without) const = 0;
  virtual void run(const OperatorHandle& op, DispatchKeySet keys) = 0;
  virtual void keep() = 0;     // so that it can
  virtual void restore() = 0;  // run again: a kernel that failed may have taken its arguments

 protected:
  ~Form() = default;
  static bool is_met(c10::ArrayRef<Met> met, int position) {
    return std::any_of(met.begin(), met.end(), [&](const Met& m) { return m.position == position; });
  }
};

class Boxed final : public Form {
 public:
  Boxed(const Rule& rule, Stack* stack) : rule_(rule), stack_(stack), first_(stack->size() - rule.arguments) {}

  void each_argument(Each f) const override {
    for (uint16_t position : rule_.tensors) each_tensor((*stack_)[first_ + position], position, f);
  }
  void each_output(Each f) const override {
    for (size_t i = stack_->size() - rule_.returns; i < stack_->size(); i++) each_tensor((*stack_)[i], 0, f);
  }
  bool is_training() const override { return rule_.training < 0 || (*stack_)[first_ + rule_.training].toBool(); }
  void remember(std::vector<IValue>& into, c10::ArrayRef<Met> without) const override {
    for (int i = 0; i < rule_.arguments; i++) {
      const IValue& argument = (*stack_)[first_ + i];
      if (!is_met(without, i)) into.push_back(argument);
      else into.push_back(argument.isList() ? without_tensors(argument) : IValue());
    }
  }
  void run(const OperatorHandle& op, DispatchKeySet keys) override { op.redispatchBoxed(keys, stack_); }
  void keep() override { kept_.append(stack_->begin() + first_, stack_->end()); }
  void restore() override {
    stack_->resize(first_);
    stack_->insert(stack_->end(), kept_.begin(), kept_.end());
  }

 private:
  static IValue without_tensors(const IValue& list) {
    auto copy = list.toList().copy();
    for (size_t i = 0; i < copy.size(); i++)
      if (copy.get(i).isTensor()) copy.set(i, at::Tensor());
    return copy;
  }

  const Rule& rule_;
  Stack* const stack_;
  const size_t first_;
  c10::SmallVector<IValue, 8> kept_;
};

template <class Op, class Schema>
class Typed;

template <class Op, class Result, class... Arguments>
class Typed<Op, Result(Arguments...)> final : public Form {
 public:
  explicit Typed(Arguments... arguments) : arguments_(static_cast<Arguments>(arguments)...) {}

  void each_argument(Each f) const override {
    int position = 0;
    std::apply([&](const auto&... argument) { (visit(argument, position++, f), ...); }, arguments_);
  }
  void each_output(Each f) const override { visit(*result_, 0, f); }
  bool is_training() const override { return false; }
  void remember(std::vector<IValue>& into, c10::ArrayRef<Met> without) const override {
    int position = 0;
    std::apply([&](const auto&... one) { (into.push_back(boxed(one, is_met(without, position++))), ...); }, arguments_);
  }
  void run(const OperatorHandle&, DispatchKeySet keys) override {
    std::apply(
        [&](auto&... argument) {
          if constexpr (std::is_reference_v<Result>) result_ = &Op::redispatch(keys, static_cast<Arguments>(argument)...);
          else result_.emplace(Op::redispatch(keys, static_cast<Arguments>(argument)...));
        },
        arguments_);
  }
  void keep() override {}
  void restore() override {}
  Result result() {
    if constexpr (std::is_reference_v<Result>) return *result_;
    else return *std::move(result_);
  }

 private:
  template <class T>
  static void visit(const T& given, int position, Each f) {
    if constexpr (std::is_same_v<T, at::Tensor>) {
      f(given.unsafeGetTensorImpl(), position, -1);
    } else if constexpr (std::is_same_v<T, std::optional<at::Tensor>>) {
      if (given) visit(*given, position, f);
    } else if constexpr (std::is_same_v<T, at::ITensorListRef>) {
      int item = 0;
      for (const at::Tensor& tensor : given) f(tensor.unsafeGetTensorImpl(), position, item++);
    } else if constexpr (requires { std::tuple_size<T>::value; }) {
      std::apply([&](const auto&... part) { (visit(part, position, f), ...); }, given);
    }
  }
  template <class T>
  static IValue boxed(const T& given, bool without) {
    if constexpr (std::is_same_v<T, at::ITensorListRef>) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : given) list.push_back(without ? at::Tensor() : tensor);
      return list;
    } else {
      return without ? IValue() : IValue(given);
    }
  }

  std::tuple<Arguments...> arguments_;
  std::conditional_t<std::is_reference_v<Result>, std::remove_reference_t<Result>*, std::optional<Result>> result_{};
};
