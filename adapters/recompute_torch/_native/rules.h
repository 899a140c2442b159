// What an operator does, by its schema; asked once for each overload. The same as recompute_torch/_rules.py.

enum class Kind : uint8_t {
  PASS,    // it only looks at geometry, or is composed of others, which come by themselves
  LOOK,    // it makes no tensor
  MAKE,    // all that it makes is new
  WRITE,   // it writes to some of its arguments
  RESIZE,  // a tensor gets another storage, or a larger one
};

struct Rule {
  std::string name;
  Kind kind = Kind::PASS;
  bool seeded = false;             // it draws from a generator
  bool out = false;                // it writes to a tensor that it may make larger
  bool buffer = false;             // what it makes is filled later
  bool overwrites = false;         // what it writes does not depend on what was there
  bool once = false;               // it must not run again: other processes take part, or it would make other bits
  bool own = false;                // of torch: no code of others runs in it
  int8_t span = 0;                 // 1: profilers hear of a span that begins, as a step of an optimizer does; -1: ends
  int hidden = -1, training = -1;  // running statistics: the first argument; the one that says whether they are written
  uint16_t arguments = 0, returns = 0;
  std::vector<uint16_t> tensors;   // arguments that are tensors, or lists of them
  std::vector<uint16_t> writes;
  mutable int64_t repeats = 0;
  mutable uint64_t repeated_ticks = 0;
};

bool is_one_of(const std::string& name, std::initializer_list<const char*> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool has_tensor(const c10::TypePtr& type) { return type->str().find("Tensor") != std::string::npos; }

Rule make_rule(const OperatorHandle& op) {
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  Rule rule;
  rule.name = toString(op.operator_name());
  rule.arguments = schema.arguments().size();
  rule.returns = schema.returns().size();
  rule.seeded = op.hasTag(at::Tag::nondeterministic_seeded);
  rule.own = name.rfind("aten::", 0) == 0;
  rule.span = is_one_of(name, {"profiler::_record_function_enter", "profiler::_record_function_enter_new"}) ? 1 :
      name == "profiler::_record_function_exit" ? -1 : 0;
  rule.once = name.rfind("c10d", 0) == 0 || name.rfind("_c10d", 0) == 0 || name.rfind("symm_mem::", 0) == 0 ||
      name == "aten::linalg_lstsq";
  const bool direct = op.hasKernelForDispatchKey(DispatchKey::CPU) ||
      op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
      op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional);
  if (!direct && op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd)) return rule;
  for (size_t i = 0; i < schema.arguments().size(); i++)
    if (has_tensor(schema.arguments()[i].type())) rule.tensors.push_back(i);
  if (is_one_of(name, {"aten::resize_", "aten::resize_as_", "aten::set_"})) {
    rule.kind = Kind::RESIZE;
    return rule;
  }
  if (op.hasTag(at::Tag::inplace_view)) return rule;
  rule.overwrites = is_one_of(name, {"aten::copy_", "aten::zero_", "aten::fill_", "aten::normal_", "aten::uniform_",
      "aten::exponential_", "aten::bernoulli_", "aten::random_", "aten::geometric_", "aten::log_normal_", "aten::cauchy_"});
  rule.buffer = is_one_of(name, {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::empty_permuted",
      "aten::new_empty", "aten::new_empty_strided"});
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    const auto& argument = schema.arguments()[i];
    const auto* alias = argument.alias_info();
    if (alias && alias->isWrite()) {
      rule.writes.push_back(i);
      rule.out |= argument.kwarg_only();
    }
    if (argument.name() == "running_mean" && !alias &&
        is_one_of(name, {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}))
      rule.hidden = i;
    if (argument.name() == "training" && rule.hidden >= 0) rule.training = i;
  }
  bool made = false, viewed = !schema.returns().empty();
  for (const auto& output : schema.returns()) {
    made |= has_tensor(output.type());
    viewed &= output.alias_info() != nullptr && !output.alias_info()->isWrite();
  }
  if (!rule.writes.empty()) rule.kind = Kind::WRITE;
  else if (viewed || name == "aten::_unsafe_view" || name == "aten::_efficientzerotensor") rule.kind = Kind::PASS;
  else rule.kind = made ? Kind::MAKE : Kind::LOOK;
  return rule;
}

auto& rules = *new std::unordered_map<const void*, std::vector<std::unique_ptr<Rule>>>;

// By the address of the schema. Of operators that others register and take back, another may lie there later.
const Rule& rule_of(const OperatorHandle& op) {
  const void* key = &op.schema();
  thread_local std::unordered_map<const void*, const Rule*> known;  // no lock on the way that is always taken
  if (auto it = known.find(key); it != known.end())
    if (it->second->own || it->second->name == toString(op.operator_name())) return *it->second;
  Lock lock;
  auto& here = rules[key];
  if (here.empty() || here.back()->name != toString(op.operator_name()))
    here.push_back(std::make_unique<Rule>(make_rule(op)));
  known[key] = here.back().get();
  return *here.back();
}
