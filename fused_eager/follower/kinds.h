// The kinds of numbers, as tracing/numbers.py tells them apart: by their sign, and by which dtypes hold them.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include <c10/util/SmallVector.h>

namespace fused_eager {

using Kinds = c10::SmallVector<char, 8>;

inline char kind_of(double number) {
  static const std::array<double, 14> bounds = {
      127.0, 128.0, 255.0, 32767.0, 32768.0, 65504.0, 65535.0, 2147483647.0, 2147483648.0, 4294967295.0,
      std::nextafter(9223372036854775808.0, 0.0), 0x1.fep127, std::numeric_limits<float>::max(),
      std::numeric_limits<double>::max()};
  if (std::isnan(number)) return 0;
  if (number == 0) return 1;
  const auto reach = std::lower_bound(bounds.begin(), bounds.end(), std::fabs(number)) - bounds.begin();
  return static_cast<char>(2 + reach + (number < 0 ? bounds.size() + 1 : 0));
}

}  // namespace fused_eager
