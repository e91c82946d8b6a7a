/* A kernel as FlashAttention 4 exports it, but on the CPU: float32 attention over pages.

   Its arguments are those of _flash_attn_fwd's call_args on compute capability 9.x. As the real one
   it has an undefined symbol, which a library that is loaded before it defines. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <tvm/ffi/c_api.h>

#ifndef FAULT
#define FAULT 0
#endif

extern int fake_runtime_is_loaded(void);

enum { Q, K, V, OUT, LSE, SCALE, QUERY_ENDS, CU_K, USED_Q, KV_LENS, PAGES, LEFT, RIGHT, SINK, SPARSE, AUX };

static const DLTensor* tensor(const TVMFFIAny* given) {
  if (given->type_index == kTVMFFINone) return NULL;
  if (given->type_index == kTVMFFIDLTensorPtr) return (const DLTensor*)given->v_ptr;
  return (const DLTensor*)((const char*)given->v_obj + sizeof(TVMFFIObject));
}

static float* at(const DLTensor* t, int64_t i, int64_t j, int64_t head) {
  float* first = (float*)((char*)t->data + t->byte_offset);
  return first + i * t->strides[0] + j * t->strides[1] + head * t->strides[2];
}

static int32_t number(const DLTensor* t, int64_t index) {
  return ((const int32_t*)((const char*)t->data + t->byte_offset))[index];
}

int __tvm_ffi_func(void* self, const TVMFFIAny* args, int32_t num_args, TVMFFIAny* result) {
  const DLTensor *q = tensor(&args[Q]), *k = tensor(&args[K]), *v = tensor(&args[V]);
  const DLTensor *out = tensor(&args[OUT]), *ends = tensor(&args[QUERY_ENDS]);
  const DLTensor *kv_lens = tensor(&args[KV_LENS]), *pages = tensor(&args[PAGES]);
  double scale = args[SCALE].v_float64;
  int64_t window = args[LEFT].type_index == kTVMFFINone ? -1 : args[LEFT].v_int64;
  if (num_args != 18 || !fake_runtime_is_loaded() || args[AUX].type_index != kTVMFFIArray) {
    TVMFFIErrorSetRaisedFromCStr("TypeError", "not as FlashAttention 4 calls its kernels");
    return -1;
  }
  int decode = ends == NULL;
  int64_t heads = q->shape[q->ndim - 2], dim = q->shape[q->ndim - 1], page = k->shape[1];
  int64_t group = heads / k->shape[2];
  for (int64_t row = 0; row < kv_lens->shape[0]; ++row) {
    int64_t length = number(kv_lens, row);
    int64_t first = decode ? row : number(ends, row), last = decode ? row + 1 : number(ends, row + 1);
    double* weights = malloc(sizeof(double) * length);
    for (int64_t token = first; token < last; ++token)
      for (int64_t head = 0; head < heads; ++head) {
        int64_t seen = length - (last - token) + 1, from = 0;
        if (window >= 0 && seen - 1 - window > 0) from = seen - 1 - window;
        const float* query = decode ? at(q, token, 0, head) : at(q, token, head, 0);
        float* written = decode ? at(out, token, 0, head) : at(out, token, head, 0);
        double sum = 0;
        for (int64_t key = from; key < seen; ++key) {
          int64_t at_page = number(pages, row * pages->shape[1] + key / page);
          const float* one = at(k, at_page, key % page, head / group);
          double score = 0;
          for (int64_t d = 0; d < dim; ++d) score += (double)query[d] * one[d];
          sum += weights[key] = exp(score * scale);
        }
        for (int64_t d = 0; d < dim; ++d) {
          double value = 0;
          for (int64_t key = from; key < seen; ++key) {
            int64_t at_page = number(pages, row * pages->shape[1] + key / page);
            value += weights[key] * at(v, at_page, key % page, head / group)[d];
          }
          written[d] = (float)(value / sum) + FAULT;
        }
      }
    free(weights);
  }
  result->type_index = kTVMFFINone;
  result->v_int64 = 0;
  return 0;
}
