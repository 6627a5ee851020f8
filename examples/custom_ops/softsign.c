/* The operator acme.ops::ScaledSoftsign, y = scale * x / (1 + |x|) on float32, as a library for ONNX Runtime.
 *
 *     cc -O2 -shared -fPIC -o libsoftsign.so softsign.c -lm
 *
 * It needs no header of ONNX Runtime. The runtime passes its C API as a table of functions. New versions only append to
 * this table, so each function keeps its position. `Slot` lists the positions of the functions that are used here. The
 * struct of an operator is that of API version 8. With structs of older versions, ONNX Runtime 1.31 crashes, because it
 * always calls the last two callbacks of version 8.
 * If onnxruntime_c_api.h is available, use it instead.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>

enum { API_VERSION = 8, FLOAT = 1, REQUIRED = 0 };

enum Slot {
    CREATE_CUSTOM_OP_DOMAIN = 26,
    CUSTOM_OP_DOMAIN_ADD = 27,
    ADD_CUSTOM_OP_DOMAIN = 28,
    GET_TENSOR_MUTABLE_DATA = 51,
    GET_DIMENSIONS_COUNT = 61,
    GET_DIMENSIONS = 62,
    GET_TENSOR_SHAPE_ELEMENT_COUNT = 64,
    GET_TENSOR_TYPE_AND_SHAPE = 65,
    KERNEL_INFO_GET_ATTRIBUTE_FLOAT = 85,
    KERNEL_CONTEXT_GET_INPUT = 90,
    KERNEL_CONTEXT_GET_OUTPUT = 91,
    RELEASE_STATUS = 93,
    RELEASE_TENSOR_TYPE_AND_SHAPE_INFO = 99
};

enum { MOST_DIMENSIONS = 16, MOST_KERNELS = 64 };

typedef void *Status; /* NULL is success */
typedef void (*Function)(void);

typedef struct {
    const Function *(*get_api)(uint32_t version);
    const char *(*get_version)(void);
} ApiBase;

typedef struct Operator {
    uint32_t version;
    void *(*create_kernel)(const struct Operator *, const Function *, const void *);
    const char *(*get_name)(const struct Operator *);
    const char *(*get_provider)(const struct Operator *);
    int (*get_input_type)(const struct Operator *, size_t);
    size_t (*get_input_count)(const struct Operator *);
    int (*get_output_type)(const struct Operator *, size_t);
    size_t (*get_output_count)(const struct Operator *);
    void (*compute)(void *, void *);
    void (*destroy_kernel)(void *);
    int (*get_input_characteristic)(const struct Operator *, size_t);
    int (*get_output_characteristic)(const struct Operator *, size_t);
    Function later[32]; /* NULL: callbacks of newer versions */
} Operator;

static const Function *api;

#define CALL(slot, ...) (((Status (*)())api[slot])(__VA_ARGS__))

typedef struct {
    float scale;
    int used;
} Kernel;

static Kernel kernels[MOST_KERNELS];

static void *create_kernel(const Operator *self, const Function *table, const void *info) {
    (void)self;
    (void)table;
    for (int i = 0; i < MOST_KERNELS; i++) {
        if (!__sync_lock_test_and_set(&kernels[i].used, 1)) {
            Status status = CALL(KERNEL_INFO_GET_ATTRIBUTE_FLOAT, info, "scale", &kernels[i].scale);
            if (status) {
                ((void (*)(Status))api[RELEASE_STATUS])(status);
                kernels[i].scale = 1.0f;
            }
            return &kernels[i];
        }
    }
    return NULL;
}

static void destroy_kernel(void *kernel) { __sync_lock_release(&((Kernel *)kernel)->used); }

static void compute(void *kernel, void *context) {
    void *input = NULL, *output = NULL, *shape = NULL;
    float *from = NULL, *to = NULL;
    int64_t dimensions[MOST_DIMENSIONS];
    size_t rank = 0, count = 0;
    if (!kernel || CALL(KERNEL_CONTEXT_GET_INPUT, context, (size_t)0, &input)) return;
    if (CALL(GET_TENSOR_TYPE_AND_SHAPE, input, &shape)) return;
    if (!CALL(GET_DIMENSIONS_COUNT, shape, &rank) && rank <= MOST_DIMENSIONS &&
        !CALL(GET_DIMENSIONS, shape, dimensions, rank) && !CALL(GET_TENSOR_SHAPE_ELEMENT_COUNT, shape, &count) &&
        !CALL(KERNEL_CONTEXT_GET_OUTPUT, context, (size_t)0, dimensions, rank, &output) &&
        !CALL(GET_TENSOR_MUTABLE_DATA, input, &from) && !CALL(GET_TENSOR_MUTABLE_DATA, output, &to)) {
        for (size_t i = 0; i < count; i++) to[i] = ((Kernel *)kernel)->scale * from[i] / (1.0f + fabsf(from[i]));
    }
    ((void (*)(void *))api[RELEASE_TENSOR_TYPE_AND_SHAPE_INFO])(shape);
}

static const char *get_name(const Operator *self) { return (void)self, "ScaledSoftsign"; }
static const char *get_provider(const Operator *self) { return (void)self, NULL; } /* the CPU */
static int get_type(const Operator *self, size_t index) { return (void)self, (void)index, FLOAT; }
static int get_required(const Operator *self, size_t index) { return (void)self, (void)index, REQUIRED; }
static size_t one(const Operator *self) { return (void)self, 1; }

static const Operator softsign = {
    .version = API_VERSION,
    .create_kernel = create_kernel,
    .get_name = get_name,
    .get_provider = get_provider,
    .get_input_type = get_type,
    .get_input_count = one,
    .get_output_type = get_type,
    .get_output_count = one,
    .compute = compute,
    .destroy_kernel = destroy_kernel,
    .get_input_characteristic = get_required,
    .get_output_characteristic = get_required,
};

Status RegisterCustomOps(void *options, const ApiBase *base) {
    static void *domain; /* lives as long as the library, as sessions need it */
    api = base->get_api(API_VERSION);
    Status status = NULL;
    if (!domain) {
        status = CALL(CREATE_CUSTOM_OP_DOMAIN, "acme.ops", &domain);
        if (!status) status = CALL(CUSTOM_OP_DOMAIN_ADD, domain, &softsign);
    }
    return status ? status : CALL(ADD_CUSTOM_OP_DOMAIN, options, domain);
}
