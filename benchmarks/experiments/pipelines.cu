// The models behind docs/lab/05-..., 06-... and 08-...: what an SM can store, a copy by
// the copy engine beside a grid on all SMs, one ring a block for dispatch, blocks by role for
// combine. Two GPUs in one process, no flags, 4,096 own and 4,096 remote rows of 14,336 bytes, 4
// rows a copy; the times are the least of six, of the slower GPU. It moves bytes and checks none.
//
//   nvcc -std=c++17 -O3 -gencode=arch=compute_90,code=sm_90 benchmarks/experiments/pipelines.cu -o
//   build/pipelines && build/pipelines
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>
#define CK(x)                                                                 \
    do {                                                                      \
        cudaError_t e = (x);                                                  \
        if (e != cudaSuccess) {                                               \
            printf("CUDA err %s line %d\n", cudaGetErrorString(e), __LINE__); \
            exit(3);                                                          \
        }                                                                     \
    } while (0)
__device__ __forceinline__ uint32_t s2u(const void* p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}
__device__ __forceinline__ void mwait(void* b, uint32_t ph) {
    uint32_t ok = 0;
    while (!ok)
        asm volatile(
            "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p,[%1],%2; selp.u32 %0,1,0,p;}"
            : "=r"(ok)
            : "r"(s2u(b)), "r"(ph)
            : "memory");
}
__device__ __forceinline__ void minit(void* b, int n) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0],%1;" ::"r"(s2u(b)), "r"(n));
}
__device__ __forceinline__ void marr(void* b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _,[%0];" ::"r"(s2u(b)) : "memory");
}
__device__ __forceinline__ void mexp(void* b, int n) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(s2u(b)), "r"(n)
                 : "memory");
}
__device__ __forceinline__ void ld(void* s, const void* g, int n, void* b) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::
            "r"(s2u(s)),
        "l"(g), "r"(n), "r"(s2u(b))
        : "memory");
}
__device__ __forceinline__ void st(void* g, const void* s, int n) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0],[%1],%2;" ::"l"(g), "r"(s2u(s)),
                 "r"(n)
                 : "memory");
}
__device__ __forceinline__ void cmt() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wread() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ void wall() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
constexpr int B = 14336, T = 4096, K = 4;
struct P {
    const char* x;
    char* outbox;
    const char* peer;
    const int* own;
    const int* rem;
    char* rows;
    int nl;
    int mode;
    int st;
};
// mode 0: roles by block (first nl: x->outbox+own rows; rest: peer->rows). mode 1: every block
// mixes both (1 own, 1 remote in turn). mode 2: no publish: roles by block, own from x only. 3:
// mixed without publish
constexpr int MAXST = 15;
template <int WIN>
__global__ void __launch_bounds__(64, 1) dispatch(const __grid_constant__ P p) {
    extern __shared__ __align__(128) char smem[];
    __shared__ alignas(8) uint64_t full[MAXST], empty[MAXST];
    const int ST = p.st;
    if (threadIdx.x == 0) {
        for (int i = 0; i < ST; i++) {
            minit(&full[i], 1);
            minit(&empty[i], 1);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    bool publish = p.mode < 2, mixed = p.mode & 1;
    int b = blockIdx.x, nb = gridDim.x;
    int first, step, n;  // item i in [0,n): own if ...
    if (mixed) {
        first = b;
        step = nb;
        n = 2 * T;
    } else if (b < p.nl) {
        first = b;
        step = p.nl;
        n = T;
    } else {
        first = b - p.nl;
        step = nb - p.nl;
        n = T;
    }
    auto item = [&](int i, bool& own, int& t) {
        if (mixed) {
            int j = (i - b) / nb;
            own = (j + b) & 1;
            t = (i / (2 * nb)) * nb + b;
        } else {
            own = b < p.nl;
            t = i;
        }
    };
    if (threadIdx.x < 32) {
        if (threadIdx.x == 0) {
            int j = 0;
            for (int i = first; i < n; i += step) {
                bool own;
                int t;
                item(i, own, t);
                if (t >= T) continue;
                int s = j % ST;
                if (j >= ST) mwait(&empty[s], ((j / ST) - 1) & 1);
                mexp(&full[s], B);
                ld(smem + (size_t)s * B, (own ? p.x : p.peer) + (size_t)t * B, B, &full[s]);
                j++;
            }
        }
    } else {
        int lane = threadIdx.x - 32;
        int j = 0;
        for (int i = first; i < n; i += step) {
            bool own;
            int t;
            item(i, own, t);
            if (t >= T) continue;
            int s = j % ST;
            int row = lane < K ? (own ? p.own : p.rem)[t * K + lane] : 0;
            mwait(&full[s], (j / ST) & 1);
            if (lane == 0 && own && publish) st(p.outbox + (size_t)t * B, smem + (size_t)s * B, B);
            if (lane < K) st(p.rows + (size_t)row * B, smem + (size_t)s * B, B);
            cmt();
            wread<WIN>();
            __syncwarp();
            if (lane == 0 && j >= WIN) marr(&empty[(j - WIN) % ST]);
            j++;
        }
        wall();
    }
}
// combine: blocks < np push remote (4 rows -> peer inbox), others: home (4 own rows + 1 inbox row
// -> y)
struct C {
    const char* rows;
    const int* rem;
    const int* own;
    char* peerinbox;
    const char* inbox;
    char* y;
    int np;
    int mode;
};
constexpr int CT = 224;
template <int ST, int OUT>
__global__ void __launch_bounds__(CT + 32, 1) combine(const __grid_constant__ C p) {
    extern __shared__ __align__(128) char smem[];
    char* outb = smem + (size_t)ST * B;
    __shared__ alignas(8) uint64_t full[ST], empty[ST];
    if (threadIdx.x == 0) {
        for (int i = 0; i < ST; i++) {
            minit(&full[i], 1);
            minit(&empty[i], CT / 32);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    int b = blockIdx.x, nb = gridDim.x;
    bool push = b < p.np;
    int first = push ? b : b - p.np, step = push ? p.np : nb - p.np;
    int nr = push ? 4 : 5;
    if (p.mode == 1 && !push) return;
    if (p.mode == 2 && push) return;
    if (threadIdx.x >= CT) {
        int lane = threadIdx.x - CT;
        int j = 0;
        for (int t = first; t < T; t += step) {
            if (lane < nr) {
                int jj = j + lane, s = jj % ST;
                const char* src = lane < 4
                                      ? p.rows + (size_t)(push ? p.rem : p.own)[t * K + lane] * B
                                      : p.inbox + (size_t)t * B;
                if (jj >= ST) mwait(&empty[s], ((jj / ST) - 1) & 1);
                mexp(&full[s], B);
                ld(smem + (size_t)s * B, src, B, &full[s]);
            }
            __syncwarp();
            j += nr;
        }
        return;
    }
    int j = 0, o = 0;
    const int tid = threadIdx.x;
    for (int t = first; t < T; t += step) {
        float a[4][8], c[4][8];
#pragma unroll 1
        for (int q = 0; q < nr; q++, j++) {
            int s = j % ST;
            mwait(&full[s], (j / ST) & 1);
            if (q == 4) {
                for (int v = 0; v < 4; v++)
                    for (int e = 0; e < 8; e++) {
                        c[v][e] = __bfloat162float(__float2bfloat16_rn(a[v][e]));
                        a[v][e] = c[v][e];
                    }
            }
#pragma unroll
            for (int v = 0; v < 4; v++) {
                uint4 x = *(const uint4*)(smem + (size_t)s * B + (size_t)(v * CT + tid) * 16);
                uint32_t w[4] = {x.x, x.y, x.z, x.w};
                for (int e = 0; e < 4; e++) {
                    float lo = __uint_as_float(w[e] << 16),
                          hi = __uint_as_float(w[e] & 0xffff0000u);
                    a[v][2 * e] = q ? a[v][2 * e] + lo : lo;
                    a[v][2 * e + 1] = q ? a[v][2 * e + 1] + hi : hi;
                }
            }
            __syncwarp();
            if ((tid & 31) == 0) marr(&empty[s]);
        }
        if (tid == 0) wread<OUT - 1>();
        asm volatile("bar.sync 1,%0;" ::"n"(CT) : "memory");
        for (int v = 0; v < 4; v++) {
            uint4 x;
            __nv_bfloat162* pp = (__nv_bfloat162*)&x;
            for (int e = 0; e < 4; e++) pp[e] = __floats2bfloat162_rn(a[v][2 * e], a[v][2 * e + 1]);
            *(uint4*)(outb + (size_t)o * B + (size_t)(v * CT + tid) * 16) = x;
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        asm volatile("bar.sync 1,%0;" ::"n"(CT) : "memory");
        if (tid == 0) {
            st((push ? p.peerinbox : p.y) + (size_t)t * B, outb + (size_t)o * B, B);
            cmt();
        }
        o = (o + 1) % OUT;
    }
    if (tid == 0) wall();
}
// stores only: warps < nt by TMA, others ordinary
__global__ void __launch_bounds__(512, 1) stores(char* dst, int per, int nt, int nl) {
    extern __shared__ __align__(128) char smem[];
    int w = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (w >= nt + nl) return;
    char* d = dst + ((size_t)blockIdx.x * (nt + nl) + w) * (size_t)per * B;
    if (w < nt) {
        if (lane == 0) {
            for (int i = 0; i < per; i++) {
                st(d + (size_t)i * B, smem, B);
                cmt();
                wread<2>();
            }
            wall();
        }
    } else
        for (int i = 0; i < per; i++)
            for (int v = lane; v < B / 16; v += 32)
                *(uint4*)(d + (size_t)i * B + v * 16) = make_uint4(i, v, w, 0);
}
__global__ void hog(volatile int* stop) {
    extern __shared__ char smem[];
    while (!*stop) __nanosleep(200);
}
int G;
cudaStream_t str[2];
cudaEvent_t ea[2], eb[2];
template <class F>
float timeit(F f) {
    float best = 1e9;
    for (int it = 0; it < 6; it++) {
        for (int g = 0; g < G; g++) {
            cudaSetDevice(g);
            CK(cudaEventRecord(ea[g], str[g]));
            f(g);
            CK(cudaGetLastError());
            CK(cudaEventRecord(eb[g], str[g]));
        }
        float mx = 0;
        for (int g = 0; g < G; g++) {
            cudaSetDevice(g);
            CK(cudaStreamSynchronize(str[g]));
            float ms;
            cudaEventElapsedTime(&ms, ea[g], eb[g]);
            mx = std::max(mx, ms);
        }
        best = std::min(best, mx);
    }
    return best * 1e3;
}
int main() {
    int ng;
    CK(cudaGetDeviceCount(&ng));
    G = ng > 1 ? 2 : 1;
    size_t RB = (size_t)2 * T * K * B;
    char *x[2], *ob[2], *rows[2], *inb[2], *y[2];
    int *own[2], *rem[2];
    for (int g = 0; g < G; g++) {
        cudaSetDevice(g);
        if (G > 1) {
            cudaDeviceEnablePeerAccess(1 - g, 0);
        }
        cudaGetLastError();
        CK(cudaStreamCreate(&str[g]));
        cudaEventCreate(&ea[g]);
        cudaEventCreate(&eb[g]);
        for (char** q : {&x[g], &ob[g], &inb[g], &y[g]}) {
            CK(cudaMalloc(q, (size_t)T * B));
            CK(cudaMemset(*q, 0x3f, (size_t)T * B));
        }
        CK(cudaMalloc(&rows[g], RB));
        CK(cudaMemset(rows[g], 0x3f, RB));
        CK(cudaMalloc(&own[g], T * K * 4));
        CK(cudaMalloc(&rem[g], T * K * 4));
        // expert-grouped rows: expert e of 8 has 2*T*K/8 rows: source-major inside
        std::vector<int> ho(T * K), hr(T * K);
        srand(g + 1);
        int cnt[2][8] = {};
        std::vector<int> pick[2];
        for (int s = 0; s < 2; s++) {
            auto& h = s ? hr : ho;
            for (int t = 0; t < T; t++) {
                int e[8];
                for (int i = 0; i < 8; i++) e[i] = i;
                std::random_shuffle(e, e + 8);
                std::sort(e, e + 4);
                for (int k = 0; k < 4; k++) {
                    h[t * K + k] = e[k];
                }
            }
        }
        // exact group sizes
        int c[8] = {};
        for (int v : ho) c[v]++;
        for (int v : hr) c[v]++;
        int off[9] = {0};
        for (int e = 0; e < 8; e++) off[e + 1] = off[e] + c[e];
        int cur[8];
        for (int e = 0; e < 8; e++) cur[e] = off[e];
        auto& A = g ? hr : ho;
        auto& Bq = g ? ho : hr;
        for (int& v : A) v = cur[v]++;
        for (int& v : Bq) v = cur[v]++;
        CK(cudaMemcpy(own[g], ho.data(), T * K * 4, cudaMemcpyHostToDevice));
        CK(cudaMemcpy(rem[g], hr.data(), T * K * 4, cudaMemcpyHostToDevice));
    }
    // E1 stores
    cudaSetDevice(0);
    CK(cudaFuncSetAttribute(stores, cudaFuncAttributeMaxDynamicSharedMemorySize, B));
    {
        int sG = G;
        G = 1;
        for (int nb : {1, 16, 48})
            for (auto c :
                 {std::pair<int, int>{1, 0}, {4, 0}, {0, 4}, {0, 8}, {0, 16}, {2, 8}, {4, 8}}) {
                int w = c.first + c.second;
                int per = std::max(1, (int)(RB / B / std::max(nb, 16) / w));
                float us = timeit([&](int g) {
                    stores<<<nb, w * 32, B, str[0]>>>(rows[0], per, c.first, c.second);
                });
                double by = (double)nb * w * per * B;
                printf("stores blocks %d tma warps %d lsu warps %d: %.1f GB/s per SM\n", nb,
                       c.first, c.second, by / 1e3 / us / nb);
            }
        G = sG;
    }
    // E2 memcpy beside a hog
    {
        cudaSetDevice(0);
        int* stop;
        CK(cudaHostAlloc(&stop, 4, cudaHostAllocMapped));
        *stop = 0;
        cudaStream_t s2;
        cudaStreamCreateWithFlags(&s2, cudaStreamNonBlocking);
        CK(cudaFuncSetAttribute(hog, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 * 1024));
        hog<<<132, 1024, 200 * 1024, str[0]>>>(stop);
        cudaEvent_t a, b;
        cudaEventCreate(&a);
        cudaEventCreate(&b);
        cudaEventRecord(a, s2);
        cudaMemcpyAsync(ob[0], x[0], (size_t)T * B, cudaMemcpyDeviceToDevice, s2);
        cudaEventRecord(b, s2);
        cudaError_t q = cudaErrorNotReady;
        for (int i = 0; i < 200 && q == cudaErrorNotReady; i++) {
            q = cudaEventQuery(b);
            struct timespec ts = {0, 1000000};
            nanosleep(&ts, 0);
        }
        printf("memcpy D2D beside a grid on all SMs: %s\n",
               q == cudaSuccess ? "ran (copy engine)" : "waited (SMs)");
        *stop = 1;
        cudaDeviceSynchronize();
        float ms;
        for (int i = 0; i < 3; i++) {
            cudaEventRecord(a, s2);
            cudaMemcpyAsync(ob[0], x[0], (size_t)T * B, cudaMemcpyDeviceToDevice, s2);
            cudaEventRecord(b, s2);
            cudaStreamSynchronize(s2);
            cudaEventElapsedTime(&ms, a, b);
        }
        printf("memcpy D2D %.1f us\n", ms * 1e3);
        for (int i = 0; i < 3; i++) {
            cudaEventRecord(a, s2);
            cudaMemcpy2DAsync(rows[0], B + 128, x[0], B, B, T, cudaMemcpyDeviceToDevice, s2);
            cudaEventRecord(b, s2);
            cudaStreamSynchronize(s2);
            cudaEventElapsedTime(&ms, a, b);
        }
        printf("memcpy2D D2D %.1f us\n", ms * 1e3);
        for (int i = 0; i < 3; i++) {
            cudaEventRecord(a, s2);
            for (int k = 0; k < 8; k++)
                cudaMemcpyAsync(ob[0] + (size_t)k * T / 8 * B, x[0] + (size_t)k * T / 8 * B,
                                (size_t)T / 8 * B, cudaMemcpyDeviceToDevice, s2);
            cudaEventRecord(b, s2);
            cudaStreamSynchronize(s2);
            cudaEventElapsedTime(&ms, a, b);
        }
        printf("8 memcpy D2D of an eighth %.1f us\n", ms * 1e3);
    }
    // E3
    for (int g = 0; g < G; g++) {
        cudaSetDevice(g);
        for (auto k : {dispatch<2>, dispatch<4>, dispatch<6>, dispatch<8>})
            CK(cudaFuncSetAttribute(k, cudaFuncAttributeMaxDynamicSharedMemorySize, 15 * B));
    }
    auto D = [&](int win, int nb, P* pp) {
        return timeit([&](int g) {
            auto k = win == 2   ? dispatch<2>
                     : win == 4 ? dispatch<4>
                     : win == 6 ? dispatch<6>
                                : dispatch<8>;
            k<<<nb, 64, 15 * B, str[g]>>>(pp[g]);
        });
    };
    auto mk = [&](P* pp, int nl, int mode, int stg) {
        for (int g = 0; g < G; g++)
            pp[g] = P{x[g], ob[g], ob[G > 1 ? 1 - g : g], own[g], rem[g], rows[g], nl, mode, stg};
    };
    P pp[2];
    for (int nb : {16, 32, 48, 64}) {
        for (int mode : {0, 1, 2, 3})
            for (auto c : {std::pair<int, int>{15, 4},
                           {15, 8},
                           {12, 8},
                           {12, 6},
                           {10, 6},
                           {8, 4},
                           {6, 4},
                           {4, 2}}) {
                if ((mode == 3) && c.first < 8 && nb != 48) continue;
                int nl = mode == 0 ? (nb * 9 + 8) / 16 : nb / 2;
                mk(pp, nl, mode, c.first);
                printf("dispatch SMs %d mode %d stages %d win %d nl %d: %.0f us\n", nb, mode,
                       c.first, c.second, nl, D(c.second, nb, pp));
            }
        for (int nl : {nb * 7 / 16, nb / 2, nb * 5 / 8}) {
            mk(pp, nl, 0, 14);
            printf("dispatch SMs %d roles nl %d stages 14 win 6: %.0f us\n", nb, nl, D(6, nb, pp));
        }
        fflush(stdout);
    }
    // E4
    for (int g = 0; g < G; g++) {
        cudaSetDevice(g);
        CK(cudaFuncSetAttribute(combine<13, 2>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                15 * B));
        CK(cudaFuncSetAttribute(combine<12, 3>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                15 * B));
        CK(cudaFuncSetAttribute(combine<8, 2>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                15 * B));
    }
    for (int nb : {16, 32, 48, 64})
        for (int np : {nb * 6 / 16, nb * 7 / 16, nb / 2})
            for (int var : {0, 1, 2})
                for (int mode : {0, 1, 2}) {
                    if (mode && (np != nb * 7 / 16)) continue;
                    C c[2];
                    for (int g = 0; g < G; g++)
                        c[g] = C{rows[g], rem[g], own[g], inb[G > 1 ? 1 - g : g],
                                 inb[g],  y[g],   np,     mode};
                    float us = timeit([&](int g) {
                        auto k = var == 0   ? combine<13, 2>
                                 : var == 1 ? combine<12, 3>
                                            : combine<8, 2>;
                        k<<<nb, CT + 32, 15 * B, str[g]>>>(c[g]);
                    });
                    printf("combine SMs %d push %d var %d mode %s: %.0f us\n", nb, np, var,
                           mode == 0   ? "both"
                           : mode == 1 ? "push only"
                                       : "home only",
                           us);
                    fflush(stdout);
                }
    return 0;
}
