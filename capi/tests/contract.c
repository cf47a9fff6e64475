/* What the interface promises, from C: right bytes, and errors where C is wrong. Its parts are named by the first argument. */
#include <flashboot.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(what)                                                                                       \
    do {                                                                                                  \
        if (!(what)) {                                                                                    \
            fprintf(stderr, "line %d: %s: last error: %s\n", __LINE__, #what, fb_last_error());           \
            exit(1);                                                                                      \
        }                                                                                                 \
    } while (0)

#define SAYS(text) CHECK(strstr(fb_last_error(), text))

static const char payload_of[] = "/target-0-0-0-0.img";

static char *file(const char *image, size_t *len) {
    char name[4096];
    snprintf(name, sizeof name, "%s%s", image, payload_of);
    FILE *in = fopen(name, "rb");
    CHECK(in);
    char *bytes = malloc(1 << 24);
    CHECK(bytes);
    *len = fread(bytes, 1, 1 << 24, in);
    fclose(in);
    return bytes;
}

static fb_arena *load(const char *path) {
    fb_load_options options = FB_LOAD_OPTIONS_INIT;
    options.path = path;
    fb_arena *arena = NULL;
    CHECK(fb_load(&options, &arena) == FB_OK && arena);
    return arena;
}

static int32_t stop(uint64_t done, uint64_t total, void *data) {
    (void)done, (void)total;
    ++*(int *)data;
    return 1;
}

static void bytes(const char *path) {
    size_t len;
    char *expected = file(path, &len);
    fb_arena *arena = load(path);
    CHECK(fb_arena_len(arena) == len && !memcmp(fb_arena_base(arena), expected, len));
    CHECK(!strcmp(fb_arena_device(arena), "cpu") && !fb_arena_read_only(arena));
    CHECK(strstr(fb_arena_report(arena), "\"source\":\"image\""));
    CHECK(fb_arena_verify(arena) == FB_OK);
    CHECK(fb_arena_tensors(arena) == 2);
    fb_tensor a, b;
    CHECK(fb_arena_tensor(arena, "a", &a) == FB_OK && fb_arena_tensor_at(arena, 0, &b) == FB_OK);
    CHECK(a.data == b.data && !strcmp(a.name, "a") && !strcmp(a.dtype, "F32") && a.what == FB_TENSOR);
    CHECK(a.dims == 2 && a.shape[0] == 3 && a.shape[1] == 5 && a.stride[0] == 5 && a.stride[1] == 1);
    CHECK(a.bytes == 60 && a.data == (const char *)fb_arena_base(arena) + a.offset);
    for (int i = 0; i < 15; i++) CHECK(((const float *)a.data)[i] == (float)i);
    CHECK(fb_arena_release(arena) == FB_OK);
    free(expected);
}

static void misuse(const char *path) {
    CHECK(!strcmp(fb_last_error(), ""));
    fb_image *image = NULL;
    CHECK(fb_image_open(NULL, &image) == FB_INVALID && !image);
    SAYS("null");
    CHECK(fb_image_open(path, NULL) == FB_INVALID);
    CHECK(fb_image_open("no/such/place", &image) == FB_UNAVAILABLE && !image);
    SAYS("no/such/place");
    CHECK(fb_image_open(path, &image) == FB_OK && image);
    CHECK(fb_image_ranks(image) == 1 && !strcmp(fb_image_rank(image, 0), "target-0-0-0-0"));
    CHECK(!fb_image_rank(image, 1));
    CHECK(strlen(fb_image_id(image)) == 64 && fb_image_verify(image) == FB_OK);

    /* Handles: null, another kind's, made up, released, released twice. */
    CHECK(fb_image_verify(NULL) == FB_INVALID);
    CHECK(fb_arena_release((fb_arena *)image) == FB_INVALID);
    SAYS("fb_arena");
    CHECK(fb_image_verify(image) == FB_OK);
    CHECK(fb_image_release((fb_image *)(uintptr_t)0x1234567) == FB_INVALID);
    CHECK(fb_image_release(image) == FB_OK);
    CHECK(fb_image_release(image) == FB_INVALID && !fb_image_id(image) && !fb_image_ranks(image));
    SAYS("released");
    fb_arena *arena = load(path);
    CHECK(fb_arena_release(arena) == FB_OK && fb_arena_release(arena) == FB_INVALID);
    fb_tensor tensor;
    CHECK(!fb_arena_base(arena) && !fb_arena_len(arena) && fb_arena_verify(arena) == FB_INVALID);
    CHECK(fb_arena_tensor(arena, "a", &tensor) == FB_INVALID);
    CHECK(fb_seed_stop(NULL) == FB_INVALID && !fb_seed_rendezvous(NULL) && !fb_seed_serving(NULL));

    arena = load(path);
    CHECK(fb_arena_tensor(arena, NULL, &tensor) == FB_INVALID && fb_arena_tensor(arena, "a", NULL) == FB_INVALID);
    CHECK(fb_arena_tensor(arena, "z", &tensor) == FB_INVALID);
    SAYS("`z`");
    CHECK(fb_arena_tensor_at(arena, 2, &tensor) == FB_INVALID);
    CHECK(fb_arena_release(arena) == FB_OK);

    /* Options: none, of another size, and words that mean nothing. */
    arena = NULL;
    CHECK(fb_load(NULL, &arena) == FB_INVALID && !arena);
    fb_load_options options = FB_LOAD_OPTIONS_INIT;
    CHECK(fb_load(&options, &arena) == FB_INVALID);
    SAYS("nothing was named");
    options.path = path;
    CHECK(fb_load(&options, NULL) == FB_INVALID);
    options.size = sizeof options + 8;
    CHECK(fb_load(&options, &arena) == FB_INVALID);
    SAYS("sizeof(fb_load_options)");
    options.size = 0;
    CHECK(fb_load(&options, &arena) == FB_INVALID);
    /* A program of an older header has the beginning only. */
    options.size = offsetof(fb_load_options, checkpoint);
    options.checkpoint = (const char *)8;
    CHECK(fb_load(&options, &arena) == FB_OK && fb_arena_release(arena) == FB_OK);
    options = (fb_load_options)FB_LOAD_OPTIONS_INIT;
    options.path = path;
    options.device = "moon";
    CHECK(fb_load(&options, &arena) == FB_INVALID);
    SAYS("moon");
    options.device = "cpu";
    options.sources = "cellar";
    CHECK(fb_load(&options, &arena) == FB_INVALID);
    options.sources = "image, checkpoint";
    options.config = "{\"load\":{\"nonsense\":1}}";
    CHECK(fb_load(&options, &arena) == FB_INVALID);
    SAYS("nonsense");
    options.config = "{\"load\":{\"engine\":\"pread\"}}";
    options.model = "\xff\xfe";
    CHECK(fb_load(&options, &arena) == FB_INVALID);
    SAYS("UTF-8");
    options.model = NULL;
    options.image_id = "0000000000000000000000000000000000000000000000000000000000000000";
    CHECK(fb_load(&options, &arena) == FB_MISMATCH);
    options.image_id = NULL;
    int told = 0;
    options.progress = stop;
    options.progress_data = &told;
    CHECK(fb_load(&options, &arena) == FB_CANCELLED && told == 1);
    options.progress = NULL;
    CHECK(fb_load(&options, &arena) == FB_OK && fb_arena_release(arena) == FB_OK);
    fb_attach_options attach = FB_ATTACH_OPTIONS_INIT;
    attach.agent = "no/such/agent";
    CHECK(fb_attach(&attach, &arena) == FB_UNAVAILABLE);
    SAYS("flashboot agent");
}

static void damaged(const char *path) {
    fb_image *image;
    CHECK(fb_image_open(path, &image) == FB_OK && fb_image_verify(image) == FB_CORRUPT);
    SAYS("pack or fetch the image again");
    CHECK(fb_image_release(image) == FB_OK);
    fb_load_options options = FB_LOAD_OPTIONS_INIT;
    options.path = path;
    fb_arena *arena = NULL;
    CHECK(fb_load(&options, &arena) == FB_CORRUPT && !arena);
}

/* On a simulated GPU, whose addresses nobody may look behind. */
static void torch(void) {
    CHECK(!fb_torch_alloc(1, 99, NULL));
    SAYS("GPU 99");
    CHECK(!fb_torch_alloc(-1, 0, NULL));
    void *one = fb_torch_alloc(3 << 20, 0, NULL), *two = fb_torch_alloc(0, 1, NULL);
    CHECK(one && two && one != two);
    uint64_t both = fb_torch_allocated();
    CHECK(both >= (5 << 20));
    fb_torch_free(one, 3 << 20, 0, NULL);
    CHECK(fb_torch_allocated() < both);
    fb_torch_free(one, 3 << 20, 0, NULL);
    SAYS("none of fb_torch_alloc's");
    fb_torch_free(two, 0, 1, NULL);
    fb_torch_free(NULL, 0, 0, NULL);
    CHECK(fb_torch_allocated() == 0);
}

static void gpu(const char *path) {
    fb_load_options options = FB_LOAD_OPTIONS_INIT;
    options.path = path;
    options.device = "cuda:1";
    fb_arena *arena;
    CHECK(fb_load(&options, &arena) == FB_OK);
    CHECK(!strcmp(fb_arena_device(arena), "cuda:1") && fb_arena_base(arena) && fb_arena_verify(arena) == FB_OK);
    CHECK(fb_arena_release(arena) == FB_OK);
}

int main(int argc, char **argv) {
    CHECK(argc == 3);
    if (!strcmp(argv[1], "bytes")) bytes(argv[2]);
    else if (!strcmp(argv[1], "misuse")) misuse(argv[2]);
    else if (!strcmp(argv[1], "damaged")) damaged(argv[2]);
    else if (!strcmp(argv[1], "gpu")) gpu(argv[2]), torch();
    else return 2;
    puts("as promised");
    return 0;
}
