/* A test double of libcuda.so.1 for kvikio on a machine without a GPU: the 35 functions that kvikio looks up.

   As long as nobody declares device memory every function answers CUDA_ERROR_NOT_INITIALIZED (3), which kvikio takes to
   mean host memory, except the two it starts with: cuInit succeeds and cuDriverGetVersion says 13.0. kvikio's own code
   then really reads and writes.

   A test may declare ranges of its host memory to be memory of a device (`double_declare_device`). Pointers into them are
   then a device's to kvikio, which fetches them through a bounce buffer with the copy functions here;
   `double_copied_bytes` tells how much. The two functions that give names and texts of errors always answer, as kvikio
   prints what they give. Prototypes follow the CUDA driver API reference, 13.0. */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3 };
enum { ATTRIBUTE_CONTEXT = 1, ATTRIBUTE_MEMORY_TYPE = 2, ATTRIBUTE_DEVICE_ORDINAL = 9 };
enum { MEMORY_TYPE_DEVICE = 2, MOST_RANGES = 64 };

typedef uintptr_t Pointer; /* CUdeviceptr */

static struct {
  Pointer begin;
  size_t nbytes;
} ranges[MOST_RANGES];
static int range_count;
static size_t copied_bytes, default_waits;
static char context, stream; /* their addresses stand for the handles */

static int range_of(Pointer pointer)
{
  for (int i = 0; i < range_count; i++) {
    if (pointer >= ranges[i].begin && pointer < ranges[i].begin + ranges[i].nbytes) { return i; }
  }
  return -1;
}

static int answer(void) { return range_count ? SUCCESS : NOT_INITIALIZED; }

static int copy(Pointer to, Pointer from, size_t nbytes)
{
  if (!range_count) { return NOT_INITIALIZED; }
  if (range_of(to) < 0 && range_of(from) < 0) { return INVALID_VALUE; }
  memcpy((void*)to, (void*)from, nbytes);
  __atomic_add_fetch(&copied_bytes, nbytes, __ATOMIC_SEQ_CST);
  return SUCCESS;
}

/* For tests, not part of CUDA. Not while transfers are under way. */
int double_declare_device(Pointer begin, size_t nbytes)
{
  if (range_count == MOST_RANGES) { return INVALID_VALUE; }
  ranges[range_count].begin    = begin;
  ranges[range_count++].nbytes = nbytes;
  return SUCCESS;
}
void double_forget_devices(void) { range_count = 0; }
size_t double_copied_bytes(void) { return copied_bytes; }
size_t double_default_waits(void) { return default_waits; }

int cuInit(unsigned flags) { return flags ? INVALID_VALUE : SUCCESS; }
int cuDriverGetVersion(int* version)
{
  *version = 13000;
  return SUCCESS;
}
int cuGetErrorName(int error, char const** text)
{
  *text = error == NOT_INITIALIZED ? "CUDA_ERROR_NOT_INITIALIZED" : "CUDA_ERROR_INVALID_VALUE";
  return SUCCESS;
}
int cuGetErrorString(int error, char const** text)
{
  *text = error == NOT_INITIALIZED ? "the test double has no device" : "the test double was asked for what it lacks";
  return SUCCESS;
}

int cuMemHostAlloc(void** memory, size_t nbytes, unsigned flags)
{
  (void)flags;
  if (!range_count) { return NOT_INITIALIZED; }
  return posix_memalign(memory, 4096, nbytes) ? INVALID_VALUE : SUCCESS;
}
int cuMemFreeHost(void* memory)
{
  free(memory);
  return SUCCESS;
}
int cuMemHostRegister_v2(void* memory, size_t nbytes, unsigned flags)
{
  (void)memory, (void)nbytes, (void)flags;
  return answer();
}
int cuMemHostUnregister(void* memory)
{
  (void)memory;
  return answer();
}
int cuMemcpyAsync(Pointer to, Pointer from, size_t nbytes, void* on)
{
  (void)on;
  return copy(to, from, nbytes);
}
int cuMemcpyHtoDAsync_v2(Pointer to, void const* from, size_t nbytes, void* on)
{
  (void)on;
  return copy(to, (Pointer)from, nbytes);
}
int cuMemcpyDtoHAsync_v2(void* to, Pointer from, size_t nbytes, void* on)
{
  (void)on;
  return copy((Pointer)to, from, nbytes);
}
int cuMemcpyBatchAsync_v2(
  Pointer* to, Pointer* from, size_t* nbytes, size_t count, void* attributes, size_t* indices, size_t kinds, void* on)
{
  (void)attributes, (void)indices, (void)kinds, (void)on;
  for (size_t i = 0; i < count; i++) {
    int error = copy(to[i], from[i], nbytes[i]);
    if (error) { return error; }
  }
  return answer();
}
int cuPointerGetAttribute(void* value, int attribute, Pointer pointer)
{
  if (!range_count) { return NOT_INITIALIZED; }
  if (range_of(pointer) < 0) { return INVALID_VALUE; } /* as CUDA answers for memory it does not know */
  switch (attribute) {
    case ATTRIBUTE_CONTEXT: *(void**)value = &context; return SUCCESS;
    case ATTRIBUTE_MEMORY_TYPE: *(unsigned*)value = MEMORY_TYPE_DEVICE; return SUCCESS;
    case ATTRIBUTE_DEVICE_ORDINAL: *(int*)value = 0; return SUCCESS;
    default: return INVALID_VALUE;
  }
}
int cuPointerGetAttributes(unsigned count, int* attributes, void** values, Pointer pointer)
{
  if (!range_count) { return NOT_INITIALIZED; }
  for (unsigned i = 0; i < count; i++) {
    if (range_of(pointer) >= 0) {
      int error = cuPointerGetAttribute(values[i], attributes[i], pointer);
      if (error) { return error; }
      continue;
    }
    switch (attributes[i]) { /* success for memory it does not know too, with nothing in the answers */
      case ATTRIBUTE_CONTEXT: *(void**)values[i] = NULL; break;
      case ATTRIBUTE_MEMORY_TYPE: *(unsigned*)values[i] = 0; break;
      case ATTRIBUTE_DEVICE_ORDINAL: *(int*)values[i] = -2; break;
      default: return INVALID_VALUE;
    }
  }
  return SUCCESS;
}
int cuMemGetAddressRange_v2(Pointer* begin, size_t* nbytes, Pointer pointer)
{
  int found = range_of(pointer);
  if (found < 0) { return range_count ? INVALID_VALUE : NOT_INITIALIZED; }
  if (begin) { *begin = ranges[found].begin; }
  if (nbytes) { *nbytes = ranges[found].nbytes; }
  return SUCCESS;
}
int cuCtxPushCurrent_v2(void* pushed)
{
  (void)pushed;
  return answer();
}
int cuCtxPopCurrent_v2(void** popped)
{
  if (popped) { *popped = &context; }
  return answer();
}
int cuCtxGetCurrent(void** current)
{
  *current = range_count ? &context : NULL;
  return answer();
}
int cuCtxGetDevice(int* device)
{
  *device = 0;
  return answer();
}
int cuStreamCreate(void** made, unsigned flags)
{
  (void)flags;
  *made = &stream;
  return answer();
}
int cuStreamSynchronize(void* on)
{
  if (!on) { __atomic_add_fetch(&default_waits, 1, __ATOMIC_SEQ_CST); }
  return answer();
}
int cuStreamDestroy_v2(void* on)
{
  (void)on;
  return answer();
}

/* Looked up when kvikio starts and not needed by what the tests do. */
#define LACKING(name) \
  int name(void) { return NOT_INITIALIZED; }
LACKING(cuCtxCreate_v4)
LACKING(cuCtxDestroy_v2)
LACKING(cuDeviceGet)
LACKING(cuDeviceGetCount)
LACKING(cuDeviceGetAttribute)
LACKING(cuDevicePrimaryCtxRetain)
LACKING(cuDevicePrimaryCtxRelease_v2)
LACKING(cuEventCreate)
LACKING(cuEventRecord)
LACKING(cuEventQuery)
LACKING(cuEventSynchronize)
LACKING(cuEventDestroy_v2)
LACKING(cuLaunchHostFunc)
