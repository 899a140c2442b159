// Who is evicted when room is needed: the best by the policy of a sample, whose neighbourhoods are counted here.
//
// The policy is the core's: `recompute.policies`. It comes as numbers when the block is opened, since its own code needs
// the interpreter's lock, and who is evicted is asked in the middle of kernels, where that cannot be waited for.
//
// For each of its policies 1 / score is a line in staleness, base + slope * staleness, and the highest is evicted:
// `height` is `Policy.line` of recompute/_policy/formulas.py. Tests compare it with `Policy.score`, policy by policy.

constexpr int STEPS = 64;  // of the pressure

struct Policy {
  enum Form : int { STEEP = 0, RECENT = 1, LARGE = 2, STEEP_ALONE = 3, DRAWN = 4, NOTHING = 5 };
  enum Around : int { NONE = 0, ANCESTORS = 1, EXACT = 2, NEEDED = 3 };
  int form = STEEP;
  int around = NEEDED;
  double power[STEPS + 1];  // of the steepness, by pressure

  static double steepness(double cost, double neighbours, double bytes, double power) {
    const double total = cost + neighbours;
    const double ratio = bytes / (total ? total : 1e-30);
    return power == 1 ? ratio : std::pow(ratio, power);
  }

  double height(double cost, double neighbours, double bytes, double staleness, int pressure) const {
    switch (form) {
      case RECENT: return staleness;
      case LARGE: return bytes;
      case STEEP_ALONE: return steepness(cost, neighbours, bytes, 1);
      default: return steepness(cost, neighbours, bytes, power[pressure]) * staleness;
    }
  }
};
Policy policy;

constexpr size_t SAMPLE = 64;  // or twice the square root of the pool, if that is more
constexpr size_t LASTS = 64;   // evictions and repeats after which a neighbourhood is counted again
constexpr size_t REACH = 256;  // calls that a walk visits at most
constexpr size_t WIDE = 256;   // users of one value

int pressure = 0;              // of STEPS: how much of what is needed is evicted
uint64_t random_state = 88172645463325252ull;
thread_local int lenient = 0;  // memory is given back, or needed where no error can come out: `overshoot` says how much

uint64_t draw() {
  random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
  return random_state;
}

// x = sqrt(E / (E + B)): E bytes are evicted and alive, B is the budget without what stays. It rises until nothing is
// evicted any more: between the rounds of a program, say.
void measure_pressure() {
  if (M.missing <= 0) {
    pressure = 0;
    return;
  }
  const double room = std::max<double>(1, double(count.budget) - double(count.used()) + double(M.pool_bytes));
  const int now = std::floor(STEPS * std::sqrt(M.missing / (M.missing + room)));
  if (now > pressure) pressure = std::min(now, STEPS);
}

double cost_above(const Value* of) {  // the evicted ancestors, each call once
  static std::vector<const Value*> path;
  const uint64_t walk = ++M.walks;
  path.clear(), path.push_back(of);
  of->call->seen = walk;
  double sum = 0;
  for (size_t i = 0; i < path.size() && i < REACH; i++)
    for (const Given& g : path[i]->call->given) {
      if (!g.value || g.value->resident() || !g.value->call || g.value->call->seen == walk) continue;
      g.value->call->seen = walk;
      sum += g.value->call->cost;
      path.push_back(g.value);
    }
  return sum;
}

struct Below {
  double needed = 0, unneeded = 0;
};

// The evicted descendants that are needed, or all of them. Of the others only the next ones count, as `unneeded`.
Below cost_below(Value* of, bool all) {
  static std::vector<Value*> path;
  const uint64_t walk = ++M.walks;
  path.clear(), path.push_back(of);
  of->seen = walk;
  Below sum;
  for (size_t i = 0; i < path.size() && i < REACH; i++) {
    const auto& users = path[i]->users;
    for (size_t u = 0; u < users.size() && u < WIDE; u++)
      for (Value* out : users[u].call->outputs) {
        if (!out || out->resident() || std::exchange(out->seen, walk) == walk) continue;
        if (all || out->needed) sum.needed += out->call->cost, path.push_back(out);
        else if (i == 0) sum.unneeded += out->call->cost;
      }
  }
  return sum;
}

bool wanted(const Value* v) {  // something evicted that is needed is made from it; published policies do not ask
  return policy.around == Policy::NEEDED && v->needed_by;
}

double height_of(Value* v) {
  M.scored++;
  double neighbours = 0;
  if (policy.around != Policy::NONE) neighbours = cost_above(v);
  if (policy.around == Policy::EXACT) {
    neighbours += cost_below(v, true).needed;
  } else if (policy.around == Policy::NEEDED) {
    const Below below = cost_below(v, false);
    const double x = double(pressure) / STEPS;
    neighbours = (1 - x / 2) * (neighbours + below.needed) + (1 - x) * below.unneeded;
  }
  v->around = neighbours;
  v->known = M.changes + LASTS;
  const double staleness = double(M.clock - v->used) + 1;
  return policy.height(v->call->cost, neighbours, v->bytes, staleness, pressure);
}

Value* choose() {  // none: nothing may be evicted
  const size_t n = M.pool.size();
  if (!n || policy.form == Policy::NOTHING) return nullptr;
  if (policy.form == Policy::DRAWN) return M.pool[draw() % n];
  measure_pressure();
  const size_t looks = std::min<size_t>(n, std::max<size_t>(SAMPLE, 2 * std::sqrt(n)));
  size_t at = draw() % n;
  const size_t step = n <= looks ? 1 : 1 + draw() % (n / looks);
  c10::SmallVector<std::pair<double, Value*>, 2 * SAMPLE> seen;
  for (size_t i = 0; i < looks; i++, at = (at + step) % n) {
    Value* v = M.pool[at];
    if (policy.around == Policy::NEEDED && !v->alive() && !v->needed_by) return v;  // it is of no use to anything
    const bool known = v->known > M.changes;
    const double own = v->call->cost, staleness = double(M.clock - v->used) + 1;
    const double around = policy.around == Policy::NONE ? 0 : known ? v->around : chain_of(v) - own;
    seen.emplace_back(policy.height(own, around, v->bytes, staleness, pressure), v);
  }
  if (policy.around == Policy::NONE) return std::max_element(seen.begin(), seen.end())->second;
  std::make_heap(seen.begin(), seen.end());
  Value* best = nullptr;
  double highest = -1;
  for (; !seen.empty() && seen[0].first > highest; seen.pop_back()) {
    const double height = height_of(seen[0].second);
    if (height > highest) highest = height, best = seen[0].second;
    std::pop_heap(seen.begin(), seen.end());
  }
  return best;
}

bool evict_until_there_is_room(int64_t wanted) {
  while (!count.fits(wanted)) {
    Value* victim = choose();
    if (!victim) return false;
    evict(victim);
  }
  return true;
}

int64_t evict_at_least(int64_t wanted) {  // if there is so much; how much went
  int64_t gone = 0;
  while (gone < wanted) {
    Value* victim = choose();
    if (!victim) break;
    gone += victim->bytes;
    evict(victim);
  }
  return gone;
}

bool evict_some(int64_t wanted) {
  if (!inside) return false;
  Lock lock;
  return evict_at_least(wanted) > 0;
}

// A thread that runs an operator waits for its turn. Others may be helpers of the one that holds the lock, in the middle
// of a kernel of its: they must not wait, and what they take may be too much for a moment.
bool make_room(int64_t wanted) {
  if (inside) {
    Lock lock;
    return evict_until_there_is_room(wanted);
  }
  const std::unique_lock lock(mutex, std::try_to_lock);
  return lock && evict_until_there_is_room(wanted);
}

bool may_throw() { return inside > 0 && !lenient; }

thread_local const Books* joined = nullptr;  // of the block that this thread was told to take part in; null: it was not

bool has_left() { return joined && joined != count.open; }  // this thread was not told that its block has ended

bool takes_part() {  // or helps one that does, or another one: whom, nobody knows
  return inside || at::in_parallel_region() || (c10::impl::tls_is_dispatch_key_included(KEY) && !has_left());
}

// `rc.BudgetError`, as torch translates errors that know their Python type. The class is torch's; its header needs those
// of Python, which are not always there.
}  // namespace
struct _object;
namespace torch {
struct PyTorchError : std::exception {
  PyTorchError(std::string text) : msg(std::move(text)) {}
  virtual _object* python_type() = 0;
  const char* what() const noexcept override { return msg.c_str(); }
  std::string msg;
};
}  // namespace torch
namespace {

_object* budget_error = nullptr;
thread_local const OperatorHandle* running = nullptr;
thread_local bool was_short = false;  // the error on its way out is ours

struct NoRoom final : torch::PyTorchError {
  using PyTorchError::PyTorchError;
  _object* python_type() override { return budget_error; }
};

std::string in_python_words(std::string name) {  // aten::add becomes aten.add.default
  if (const auto colons = name.find("::"); colons != std::string::npos) name.replace(colons, 2, ".");
  return std::count(name.begin(), name.end(), '.') > 1 ? name : name + ".default";
}

int64_t needed_at_once = 0;  // bytes, by the last operator that found no room

[[noreturn]] void throw_no_room(int64_t wanted) {
  was_short = true;
  const int64_t used = count.used(), budget = count.budget;
  needed_at_once = used + wanted;
  const std::string name = running ? in_python_words(toString(running->operator_name())) : "allocation";
  throw NoRoom(
      name + " needs " + std::to_string(wanted) + " bytes more on cpu, beside " + std::to_string(used) +
      " that are in use, none of which can be evicted now; the budget is " + std::to_string(budget) + " bytes, " +
      std::to_string(used + wanted - budget) + " too few. Raise it, or take smaller batches");
}
