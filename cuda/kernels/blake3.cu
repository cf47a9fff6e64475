// BLAKE3 subtree values of blocks of GPU memory. Follows the BLAKE3 specification (2020), sections 2.1 to 2.6.
//
// Two kernels, launched one after the other on one stream:
//   flashboot_blake3_tiles   one thread a 1 KiB chunk, one thread block a tile of 256 chunks; writes one value for
//                            every `unit` chunks (a tile, or a payload block smaller than one)
//   flashboot_blake3_blocks  one thread block a payload block of several tiles; merges their values
// The range hashed begins at a payload block. `first` is the number of its first chunk in the payload; `root` is 1
// when the range is one block that is the whole payload, whose last compression is then the root's.
// A third, beside them in this file because one module is loaded sooner than two:
//   flashboot_look           one thread; reads a source's progress word and then its generation
//
// Compiled to blake3.ptx by `cargo xtask ptx`; no headers, so that NVRTC alone is enough.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

#define TILE 256u          // chunks, and threads, of a tile
#define MAX_TILES 1024u    // tiles of a block

#define CHUNK_START 1u
#define CHUNK_END 2u
#define PARENT 4u
#define ROOT 8u

__constant__ u32 IV[8] = {0x6A09E667u, 0xBB67AE85u, 0x3C6EF372u, 0xA54FF53Au,
                          0x510E527Fu, 0x9B05688Cu, 0x1F83D9ABu, 0x5BE0CD19u};

__device__ __forceinline__ u32 rotr(u32 x, u32 n) { return __funnelshift_r(x, x, n); }

#define G(a, b, c, d, x, y)                                                                                            \
    v[a] = v[a] + v[b] + (x);                                                                                          \
    v[d] = rotr(v[d] ^ v[a], 16);                                                                                      \
    v[c] = v[c] + v[d];                                                                                                \
    v[b] = rotr(v[b] ^ v[c], 12);                                                                                      \
    v[a] = v[a] + v[b] + (y);                                                                                          \
    v[d] = rotr(v[d] ^ v[a], 8);                                                                                       \
    v[c] = v[c] + v[d];                                                                                                \
    v[b] = rotr(v[b] ^ v[c], 7);

#define ROUND(m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15)                                    \
    G(0, 4, 8, 12, m[m0], m[m1])                                                                                       \
    G(1, 5, 9, 13, m[m2], m[m3])                                                                                       \
    G(2, 6, 10, 14, m[m4], m[m5])                                                                                      \
    G(3, 7, 11, 15, m[m6], m[m7])                                                                                      \
    G(0, 5, 10, 15, m[m8], m[m9])                                                                                      \
    G(1, 6, 11, 12, m[m10], m[m11])                                                                                    \
    G(2, 7, 8, 13, m[m12], m[m13])                                                                                     \
    G(3, 4, 9, 14, m[m14], m[m15])

// One compression: `h` becomes the new chaining value. The message schedule is the specification's permutation,
// written out.
__device__ __forceinline__ void compress(u32 h[8], const u32 m[16], u64 counter, u32 len, u32 flags) {
    u32 v[16] = {h[0],  h[1],  h[2],  h[3],  h[4],         h[5],                 h[6], h[7],
                 IV[0], IV[1], IV[2], IV[3], (u32)counter, (u32)(counter >> 32), len,  flags};
    ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
    ROUND(2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
    ROUND(3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1)
    ROUND(10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6)
    ROUND(12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4)
    ROUND(9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7)
    ROUND(11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13)
#pragma unroll
    for (int i = 0; i < 8; i++) h[i] = v[i] ^ v[i + 8];
}

__device__ __forceinline__ void start(u32 h[8]) {
#pragma unroll
    for (int i = 0; i < 8; i++) h[i] = IV[i];
}

// The chaining value of one chunk of `len` bytes, 1 to 1024, or 0 for an empty payload.
__device__ __forceinline__ void chunk(u32 h[8], const u8 *data, u32 len, u64 counter, u32 root) {
    u32 m[16];
    start(h);
    u32 blocks = len == 0 ? 1 : (len + 63) / 64;
    for (u32 b = 0; b < blocks; b++) {
        u32 left = len - 64 * b;
        u32 take = left < 64 ? left : 64;
        const u8 *from = data + 64 * b;
        if (take == 64) {
            // A chunk begins at a multiple of 1024 of an allocation that is itself aligned.
            const uint4 *words = (const uint4 *)from;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint4 w = words[i];
                m[4 * i] = w.x;
                m[4 * i + 1] = w.y;
                m[4 * i + 2] = w.z;
                m[4 * i + 3] = w.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < 16; i++) {
                u32 w = 0;
#pragma unroll
                for (int j = 0; j < 4; j++)
                    if (4 * i + j < take) w |= (u32)from[4 * i + j] << (8 * j);
                m[i] = w;
            }
        }
        u32 flags = (b == 0 ? CHUNK_START : 0) | (b + 1 == blocks ? CHUNK_END | root : 0);
        compress(h, m, counter, take, flags);
    }
}

// Merges neighbours in shared memory until groups of `unit` values are one each; an odd one is carried up as it
// is, which is BLAKE3's tree. Group g ends up at values[g * unit]. `flags` go into a merge that leaves one value.
__device__ __forceinline__ void merge(u32 (*values)[8], u32 count, u32 unit, u32 at, u32 root) {
    for (u32 step = 1; step < unit; step *= 2) {
        __syncthreads();
        u32 left = at * 2 * step;
        u32 right = left + step;
        if (right < count && left < count) {
            u32 h[8], m[16];
            start(h);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                m[i] = values[left][i];
                m[8 + i] = values[right][i];
            }
            compress(h, m, 0, 64, PARENT | (left == 0 && 2 * step >= count ? root : 0));
#pragma unroll
            for (int i = 0; i < 8; i++) values[left][i] = h[i];
        }
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(TILE)
    flashboot_blake3_tiles(const u8 *data, u64 len, u64 first, u32 unit, u32 root, u32 *out) {
    __shared__ u32 values[TILE][8];
    u64 chunks = len == 0 ? 1 : (len + 1023) / 1024;
    u64 tile = (u64)blockIdx.x * TILE;
    u32 count = chunks - tile < TILE ? (u32)(chunks - tile) : TILE;
    u32 at = threadIdx.x;
    if (at < count) {
        u64 index = tile + at;
        u64 left = len - index * 1024;
        u32 h[8];
        chunk(h, data + index * 1024, left < 1024 ? (u32)left : 1024, first + index, chunks == 1 ? (root ? ROOT : 0) : 0);
#pragma unroll
        for (int i = 0; i < 8; i++) values[at][i] = h[i];
    }
    // The root's merge is here only when the whole range is in this tile.
    merge(values, count, unit, at, root && chunks <= TILE ? ROOT : 0);
    if (at < count && at % unit == 0) {
        u64 slot = (tile + at) / unit;
#pragma unroll
        for (int i = 0; i < 8; i++) out[slot * 8 + i] = values[at][i];
    }
}

extern "C" __global__ void __launch_bounds__(MAX_TILES / 2)
    flashboot_blake3_blocks(const u32 *tiles, u64 total, u32 per_block, u32 root, u32 *out) {
    __shared__ u32 values[MAX_TILES][8];
    u64 first = (u64)blockIdx.x * per_block;
    u32 count = total - first < per_block ? (u32)(total - first) : per_block;
    for (u32 i = threadIdx.x; i < count * 8; i += blockDim.x) values[i / 8][i % 8] = tiles[first * 8 + i];
    merge(values, count, per_block, threadIdx.x, root ? ROOT : 0);
    if (threadIdx.x < 8) out[(u64)blockIdx.x * 8 + threadIdx.x] = values[0][threadIdx.x];
}

// Loads, not copies: a copy of 8 bytes waits in the copy engine until the chunk before it has passed. The order is
// that of the look: the word, then the generation that vouches for it.
extern "C" __global__ void flashboot_look(const u64 *progress, const u64 *generation, u64 *out) {
    u64 word, vouching;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(progress) : "memory");
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(vouching) : "l"(generation) : "memory");
    out[0] = word;
    out[1] = vouching;
}
