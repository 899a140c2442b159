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
