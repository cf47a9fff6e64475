/*
 * flashboot: model weights into memory at wire speed, provably byte-exact. The C interface.
 *
 * Generated from the crate `flashboot-capi`: change that, not this file (`cargo run -p flashboot-capi --example header`).
 *
 * Every call may be made from any thread. A call that can fail gives an `fb_status`, and the text of a failure is
 * `fb_last_error()`'s, for the thread that called. Handles are numbers: one that was released, or NULL, is `FB_INVALID`. Text is
 * UTF-8 (paths: any bytes) and ends in a zero; what the library is given, it copies; what it gives stays as said.
 */

#ifndef FLASHBOOT_H
#define FLASHBOOT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What options begin with. */
#define FB_LOAD_OPTIONS_INIT { .size = sizeof(fb_load_options) }
#define FB_ATTACH_OPTIONS_INIT { .size = sizeof(fb_attach_options) }
#define FB_SEED_OPTIONS_INIT { .size = sizeof(fb_seed_options) }

// The number of this interface. It changes when a program that was compiled against an older header would no longer work.
#define FB_ABI_VERSION 1

// How a call ended. The text of a failure is `fb_last_error`'s.
typedef enum fb_status {
  // It did what was asked.
  FB_OK = 0,
  // The arguments cannot work: a null pointer, a handle that was released, a word that means nothing.
  FB_INVALID = 1,
  // What is asked for is not there: no file, no agent, no device.
  FB_UNAVAILABLE = 2,
  // Another image, size or protocol than the one asked for; nothing was moved.
  FB_MISMATCH = 3,
  // Bytes do not match their digest.
  FB_CORRUPT = 4,
  // The source's arena holds another filling than it said.
  FB_STALE_GENERATION = 5,
  // The source died or its connection broke.
  FB_SOURCE_LOST = 6,
  // The source is there and does not get on.
  FB_STALLED = 7,
  // The call's time is over.
  FB_DEADLINE = 8,
  // The caller's own progress function gave it up.
  FB_CANCELLED = 9,
  // The memory is in use.
  FB_BUSY = 10,
  // Not permitted.
  FB_PERMISSION = 11,
  // Out of memory, descriptors, disk space or a configured budget.
  FB_EXHAUSTED = 12,
  // An operating-system call failed.
  FB_IO = 13,
  // The peer spoke, but not our protocol.
  FB_PROTOCOL = 14,
  // This process's context of a GPU is beyond use: only a new process helps.
  FB_CONTEXT_LOST = 15,
  // A defect of flashboot's; the process may go on.
  FB_PANIC = 16,
} fb_status;

// What a name is.
typedef enum fb_what {
  // A tensor.
  FB_TENSOR = 0,
  // Another name of a tensor.
  FB_ALIAS = 1,
  // A tensor's bytes seen otherwise.
  FB_VIEW = 2,
} fb_what;

// One rank's bytes in memory. A handle: nothing may be read through it.
typedef struct fb_arena fb_arena;

// An image that was opened. A handle: nothing may be read through it.
typedef struct fb_image fb_image;

// A seed that serves. A handle: nothing may be read through it.
typedef struct fb_seed fb_seed;

// One name of an arena. All pointers stay until the arena is released.
typedef struct fb_tensor {
  // The name.
  const char *name;
  // The type of its elements, as safetensors spells it: `BF16`, `F8_E4M3`.
  const char *dtype;
  // Its first byte: an address of this process, or of the GPU.
  const void *data;
  // That byte, counted from the arena's first.
  uint64_t offset;
  // Bytes of all its elements, each counted once.
  uint64_t bytes;
  // Number of dimensions.
  size_t dims;
  // Its dimensions.
  const uint64_t *shape;
  // Its strides, in elements.
  const uint64_t *stride;
  // What the name is.
  enum fb_what what;
} fb_tensor;

// Hears how far a load is, in bytes, on the thread that called; what is not 0 gives the load up (`FB_CANCELLED`).
typedef int (*fb_progress)(uint64_t done, uint64_t total, void *data);

// What is to be loaded, and from where. Begin with `FB_LOAD_OPTIONS_INIT`; NULL says nothing. At least one of `path`, `object`,
// `checkpoint` and `rendezvous` is named.
typedef struct fb_load_options {
  // `sizeof(fb_load_options)`.
  size_t size;
  // An image's directory, or a stock checkpoint.
  const char *path;
  // A stock checkpoint to go on with where an image fails.
  const char *checkpoint;
  // An image's objects: `s3://…`, `https://…`.
  const char *object;
  // The replication service, asked for `model` and `revision`, or for `image_id`.
  const char *rendezvous;
  // What people call the model.
  const char *model;
  // Which edition of it.
  const char *revision;
  // Which rank image; the only one, unless named.
  const char *rank;
  // The image's id: nothing else is loaded.
  const char *image_id;
  // Kinds of sources in order, separated by commas: `held,staged,peer,image,object,checkpoint`.
  const char *sources;
  // `cpu`, or one GPU: `cuda:0`, a UUID, a PCI address.
  const char *device;
  // A transport by name, or `auto`.
  const char *transport;
  // A JSON object like `flashboot.toml`.
  const char *config;
  // How long the service and further sources are waited for, in milliseconds; 0: a minute.
  uint64_t patience_ms;
  // Hears how far it is.
  fb_progress progress;
  // Given to `progress`.
  void *progress_data;
} fb_load_options;

// What of the node agent's is to be attached. Begin with `FB_ATTACH_OPTIONS_INIT`. With neither `path` nor `image_id` it is the only
// arena that is held on `device`.
typedef struct fb_attach_options {
  // `sizeof(fb_attach_options)`.
  size_t size;
  // An image's directory, of which no payload is read.
  const char *path;
  // The image's id, where its directory is not at hand.
  const char *image_id;
  // Which rank image; the only one, unless named.
  const char *rank;
  // `cpu`, or one GPU.
  const char *device;
  // The directory of the agent's socket.
  const char *agent;
  // A JSON object like `flashboot.toml`.
  const char *config;
  // Not 0: a verified copy of one's own, which may be written.
  int private_copy;
} fb_attach_options;

// How an image is served. Begin with `FB_SEED_OPTIONS_INIT`; NULL says nothing. `rendezvous` or `embed` is named.
typedef struct fb_seed_options {
  // `sizeof(fb_seed_options)`.
  size_t size;
  // Which rank image; the only one, unless named.
  const char *rank;
  // What people call the model; the image's directory, unless named.
  const char *model;
  // Which edition of it.
  const char *revision;
  // The replication service to register at.
  const char *rendezvous;
  // Where to serve the service here: `127.0.0.1:0`.
  const char *embed;
  // A name that stays through restarts.
  const char *name;
  // `cpu`, or one GPU.
  const char *device;
  // A transport by name, or `auto`.
  const char *transport;
  // A JSON object like `flashboot.toml`.
  const char *config;
} fb_seed_options;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The number of the interface of the library that runs: compare it with `FB_ABI_VERSION` first of all.
uint32_t fb_abi_version(void);

// The library's release, such as `0.1.0`.
const char *fb_version(void);

// The arena's first byte: an address of this process, or of the GPU; NULL for no arena. It stays until the arena is released.
const void *fb_arena_base(const struct fb_arena *arena);

// Its bytes; 0 for no arena.
uint64_t fb_arena_len(const struct fb_arena *arena);

// `cpu`, or `cuda:N` by the GPU's number in this process; NULL for no arena. It stays until the arena is released.
const char *fb_arena_device(const struct fb_arena *arena);

// Whether it is another process's memory, attached where it is: a write to it ends this process. False for no arena.
bool fb_arena_read_only(const struct fb_arena *arena);

// The account of the load as a JSON object, with the fields of `flashboot load --json`; NULL for no arena. It stays until the arena
// is released.
const char *fb_arena_report(const struct fb_arena *arena);

// Compares every block, as it is in memory now, with the image's digests.
enum fb_status fb_arena_verify(const struct fb_arena *arena);

// How many names it has: tensors in the order of their bytes, then aliases, then views; 0 for no arena.
size_t fb_arena_tensors(const struct fb_arena *arena);

// What lies under a name.
//
// # Safety
// `name` is text, `tensor` points to such a structure of the caller's.
enum fb_status fb_arena_tensor(const struct fb_arena *arena, const char *name, struct fb_tensor *tensor);

// What lies under the name of this number.
//
// # Safety
// `tensor` points to such a structure of the caller's.
enum fb_status fb_arena_tensor_at(const struct fb_arena *arena, size_t index, struct fb_tensor *tensor);

// Releases the arena and its memory; nothing of it may be used any more.
enum fb_status fb_arena_release(struct fb_arena *arena);

// Opens the image in the directory `path`; its metadata and tables are checked.
//
// # Safety
// `path` is text, `image` points to a handle of the caller's.
enum fb_status fb_image_open(const char *path, struct fb_image **image);

// Reads every payload and compares every block with its digest: `FB_CORRUPT` where one does not match.
enum fb_status fb_image_verify(const struct fb_image *image);

// The image's id, 64 hexadecimal digits that cover every byte, offset and name; NULL for no image. It stays until the image is
// released.
const char *fb_image_id(const struct fb_image *image);

// How many rank images it has; 0 for no image.
size_t fb_image_ranks(const struct fb_image *image);

// The name of a rank image; NULL past the last. It stays until the image is released.
const char *fb_image_rank(const struct fb_image *image, size_t index);

// Releases the image. What was loaded from it stays.
enum fb_status fb_image_release(struct fb_image *image);

// Loads one rank into memory, from the first of what is named that has it, and from the next what that leaves. Of an image every
// block is verified where it lies.
//
// # Safety
// `options` points to such a structure whose texts end in zeros, and `arena` to a handle of the caller's.
enum fb_status fb_load(const struct fb_load_options *options,
                       struct fb_arena **arena);

// Reads one rank from processes that have it, as `fb_load` from `peer` alone; `rendezvous` must be named. `image_id` proves what is
// cloned; by `model` alone the service is believed which image that is.
//
// # Safety
// As `fb_load`.
enum fb_status fb_clone(const struct fb_load_options *options,
                        struct fb_arena **arena);

// Attaches to memory that the node agent of this host holds, where it is; nothing else is tried. The memory is read-only: whoever
// writes to it ends its process, or on a GPU its context.
//
// # Safety
// `options` is NULL or points to such a structure whose texts end in zeros, and `arena` points to a handle of the caller's.
enum fb_status fb_attach(const struct fb_attach_options *options,
                         struct fb_arena **arena);

// Fills memory from an image, verifies it, and serves it until it is stopped. Returns once clones can come.
//
// # Safety
// `options` points to such a structure whose texts end in zeros, and `seed` to a handle of the caller's.
enum fb_status fb_seed_start(const struct fb_image *image,
                             const struct fb_seed_options *options,
                             struct fb_seed **seed);

// The address that clones dial; NULL for no seed. It stays until the seed is stopped.
const char *fb_seed_rendezvous(const struct fb_seed *seed);

// Whether it still serves.
bool fb_seed_serving(const struct fb_seed *seed);

// Says goodbye, drains readers, ends, and releases the seed; what ended it before is the status.
enum fb_status fb_seed_stop(struct fb_seed *seed);

// Why the last call of this thread that failed did so, as one sentence with what to do next; empty where none has. It stays until
// the thread's next call that fails.
const char *fb_last_error(void);

// Memory of the GPU of this number in this process; NULL where there is none to be had, and `fb_last_error` says why. Nothing is
// queued in `stream`.
void *fb_torch_alloc(ptrdiff_t size,
                     int device,
                     void *stream);

// Gives back what `fb_torch_alloc` gave, once everything that was queued on the GPU has ended. Anything else, also twice the same,
// is left alone, and `fb_last_error` says so.
void fb_torch_free(void *memory,
                   ptrdiff_t size,
                   int device,
                   void *stream);

// Bytes that torch has of it: whole pages.
uint64_t fb_torch_allocated(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* FLASHBOOT_H */
