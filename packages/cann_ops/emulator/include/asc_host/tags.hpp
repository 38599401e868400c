// Names that generated calls pass as compile-time arguments.
#pragma once

#include <type_traits>

#include "asc_host/scalars.hpp"

namespace asc_host {

template <int V>
using Mode = std::integral_constant<int, V>;
template <int V>
struct Part {
  static constexpr int value = V;
};
template <Rounding R>
struct Round {
  static constexpr Rounding value = R;
};
template <bool B>
struct Saturate {
  static constexpr bool value = B;
};

}  // namespace asc_host

#define ASC_TAG(name, value) inline constexpr std::integral_constant<int, value> name{};
ASC_TAG(MODE_ZEROING, 0)
ASC_TAG(MODE_MERGING, 1)
ASC_TAG(MODE_UNKNOWN, 2)
ASC_TAG(MODE_STORED, 3)
ASC_TAG(INC_ORDER, 0)
ASC_TAG(DEC_ORDER, 1)
ASC_TAG(LOWER, 0)
ASC_TAG(HIGHER, 1)
ASC_TAG(POST_UPDATE, 1)
ASC_TAG(Bin_N0, 0)
ASC_TAG(Bin_N1, 1)
ASC_TAG(DINTLV_B8, 8)
ASC_TAG(DINTLV_B16, 16)
ASC_TAG(DINTLV_B32, 32)
#undef ASC_TAG

// A type of their own, so that vdup of a register and vdup of a scalar are told apart.
namespace asc_host {
template <int V>
struct Pos : std::integral_constant<int, V> {};
}  // namespace asc_host
inline constexpr asc_host::Pos<0> POS_LOWEST{};
inline constexpr asc_host::Pos<1> POS_HIGHEST{};

inline constexpr asc_host::Part<0> PART_EVEN{}, PART_P0{};
inline constexpr asc_host::Part<1> PART_ODD{}, PART_P1{};
inline constexpr asc_host::Part<2> PART_P2{};
inline constexpr asc_host::Part<3> PART_P3{};
inline constexpr asc_host::Round<asc_host::Rounding::kEven> ROUND_R{};
inline constexpr asc_host::Round<asc_host::Rounding::kAway> ROUND_A{};
inline constexpr asc_host::Round<asc_host::Rounding::kFloor> ROUND_F{};
inline constexpr asc_host::Round<asc_host::Rounding::kCeil> ROUND_C{};
inline constexpr asc_host::Round<asc_host::Rounding::kZero> ROUND_Z{};
inline constexpr asc_host::Round<asc_host::Rounding::kOdd> ROUND_O{};
inline constexpr asc_host::Saturate<false> RS_DISABLE{};
inline constexpr asc_host::Saturate<true> RS_ENABLE{};

/// Patterns of a mask: the first n lanes, halves, quarters, every third and every fourth lane.
enum asc_mask_pattern : int {
  PAT_VL1 = 1,
  PAT_VL2 = 2,
  PAT_VL3 = 3,
  PAT_VL4 = 4,
  PAT_VL8 = 8,
  PAT_VL16 = 16,
  PAT_VL32 = 32,
  PAT_VL64 = 64,
  PAT_VL128 = 128,
  PAT_ALL = 1000,
  PAT_ALLF,
  PAT_H,
  PAT_Q,
  PAT_M3,
  PAT_M4
};

enum event_t : int { EVENT_ID0 };
enum asc_load_l2_cache_mode : int {};
enum asc_store_l2_cache_mode : int {};
enum asc_dual_dst_mode : int {};
enum asc_unit_flag_mode : int {};
enum asc_quant_mode : int {};
enum asc_relu_pre_mode : int {};
enum class asc_hf32_round_mode : int { NEAREST_AWAY, NEAREST_EVEN };
enum asc_lock_mode : int { ASC_LOCK_BLOCK, ASC_LOCK_NON_BLOCK };
enum asc_membar : int {
  VV_ALL,
  VST_VLD,
  VLD_VST,
  VST_VST,
  VS_ALL,
  VST_LD,
  VLD_ST,
  VST_ST,
  SV_ALL,
  ST_VLD,
  LD_VST,
  ST_VST
};
