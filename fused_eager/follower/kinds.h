// The kinds of numbers, as tracing/numbers.py tells them apart: by their sign, and by which dtypes hold them.
#pragma once

#include <algorithm>
#include <cmath>

#include <c10/util/SmallVector.h>

#include "runtime.h"

namespace fused_eager {

using Kinds = c10::SmallVector<char, 8>;

inline char kind_of(double number) {
  if (std::isnan(number)) return 0;
  if (number == 0) return 1;
  const auto reach = std::lower_bound(BOUNDS.begin(), BOUNDS.end(), std::fabs(number)) - BOUNDS.begin();
  return static_cast<char>(2 + reach + (number < 0 ? BOUNDS.size() + 1 : 0));
}

}  // namespace fused_eager
