// What sums are made of: 16 bytes of a row at a time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace hybrid_ep::device {

// 16 bytes of a row as floats, and back.
template <typename T>
struct Vector;

template <>
struct Vector<float> {
    static constexpr int kSize = 4;
    static __device__ __forceinline__ void unpack(const uint4& v, float* f) {
        f[0] = __uint_as_float(v.x), f[1] = __uint_as_float(v.y);
        f[2] = __uint_as_float(v.z), f[3] = __uint_as_float(v.w);
    }
    static __device__ __forceinline__ uint4 pack(const float* f) {
        return {__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]),
                __float_as_uint(f[3])};
    }
};

template <>
struct Vector<__nv_bfloat16> {
    static constexpr int kSize = 8;
    static __device__ __forceinline__ void unpack(const uint4& v, float* f) {
        const uint32_t w[4] = {v.x, v.y, v.z, v.w};
        for (int i = 0; i < 4; ++i) {
            f[2 * i] = __uint_as_float(w[i] << 16);
            f[2 * i + 1] = __uint_as_float(w[i] & 0xFFFF0000u);
        }
    }
    static __device__ __forceinline__ uint32_t pair(float low, float high) {
        __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
        return *reinterpret_cast<uint32_t*>(&v);
    }
    static __device__ __forceinline__ uint4 pack(const float* f) {
        return {pair(f[0], f[1]), pair(f[2], f[3]), pair(f[4], f[5]), pair(f[6], f[7])};
    }
};

template <>
struct Vector<__half> {
    static constexpr int kSize = 8;
    static __device__ __forceinline__ void unpack(const uint4& v, float* f) {
        const uint32_t w[4] = {v.x, v.y, v.z, v.w};
        for (int i = 0; i < 4; ++i) {
            float2 two = __half22float2(*reinterpret_cast<const __half2*>(&w[i]));
            f[2 * i] = two.x, f[2 * i + 1] = two.y;
        }
    }
    static __device__ __forceinline__ uint32_t pair(float low, float high) {
        __half2 v = __floats2half2_rn(low, high);
        return *reinterpret_cast<uint32_t*>(&v);
    }
    static __device__ __forceinline__ uint4 pack(const float* f) {
        return {pair(f[0], f[1]), pair(f[2], f[3]), pair(f[4], f[5]), pair(f[6], f[7])};
    }
};

}  // namespace hybrid_ep::device
