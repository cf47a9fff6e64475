/*
 * An image into memory, and from there into another process's: opens and proves an image, serves it, clones what is
 * served, and looks a tensor up by its name.
 *
 *     cc boot.c $(pkg-config --cflags --libs flashboot) -o boot && ./boot IMAGE
 */
#include <flashboot.h>
#include <stdio.h>
#include <string.h>

static int failed(const char *what) {
    fprintf(stderr, "%s: %s\n", what, fb_last_error());
    return 1;
}

static int32_t progress(uint64_t done, uint64_t total, void *data) {
    *(uint64_t *)data = done;
    (void)total;
    return 0; /* anything else gives the load up */
}

int main(int argc, char **argv) {
    if (argc < 2 || fb_abi_version() != FB_ABI_VERSION) {
        fprintf(stderr, "usage: boot IMAGE, with the library of this header\n");
        return 2;
    }
    fb_image *image;
    if (fb_image_open(argv[1], &image) != FB_OK) return failed("open");
    if (fb_image_verify(image) != FB_OK) return failed("verify");
    printf("image %s, rank %s\n", fb_image_id(image), fb_image_rank(image, 0));

    fb_seed_options serving = FB_SEED_OPTIONS_INIT;
    serving.embed = "127.0.0.1:0";
    fb_seed *seed;
    if (fb_seed_start(image, &serving, &seed) != FB_OK) return failed("seed");

    /* In another process, on another host. */
    uint64_t seen = 0;
    fb_load_options wanted = FB_LOAD_OPTIONS_INIT;
    wanted.rendezvous = fb_seed_rendezvous(seed);
    wanted.image_id = fb_image_id(image);
    wanted.progress = progress;
    wanted.progress_data = &seen;
    fb_arena *arena;
    if (fb_clone(&wanted, &arena) != FB_OK) return failed("clone");
    if (fb_seed_stop(seed) != FB_OK) return failed("stop");

    /* It outlives its source. */
    if (fb_arena_verify(arena) != FB_OK) return failed("verify what was cloned");
    printf("%llu bytes on %s, told of %llu\n", (unsigned long long)fb_arena_len(arena), fb_arena_device(arena),
           (unsigned long long)seen);
    for (size_t i = 0; i < fb_arena_tensors(arena); i++) {
        fb_tensor tensor;
        if (fb_arena_tensor_at(arena, i, &tensor) != FB_OK) return failed("tensor");
        printf("%s %s of %zu dimensions, %llu bytes\n", tensor.name, tensor.dtype, tensor.dims,
               (unsigned long long)tensor.bytes);
    }
    if (fb_arena_release(arena) != FB_OK) return failed("release");
    if (fb_image_release(image) != FB_OK) return failed("release");
    return 0;
}
