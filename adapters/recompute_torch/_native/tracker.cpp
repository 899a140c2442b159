// Tensors within a byte budget, below Python: a boxed fallback on a dispatch key that the stock CPU wheel leaves free.
//
// Words. A VALUE is what one storage holds between two writes. A CALL is how values were made: operator, arguments,
// generator state, time. A value without a call is a SOURCE (a parameter, an input, what was written over a source): it
// stays. What a call needs to run again is its recipe.
//
// How a storage leads to its value, without a table: the storage's DataPtr is wrapped. Its context is the value, its
// deleter is `storage_gone`, which also tells when the storage dies, in any thread. The memory itself lies in the value.
//
// The budget is held by the allocator: room is made before memory is taken, scratch of kernels included. Eviction only
// frees memory, so it may happen in the middle of a kernel; what the running call takes is pinned.
//
// One file after the other, each one idea. All of them together are one translation unit: torch's headers take longer
// to read than all of this to compile.

#include "torch_headers.h"

namespace {

#include "ticks.h"     // the clock
#include "lock.h"      // one lock, and the interpreter's
#include "blocks.h"    // where memory comes from
#include "count.h"     // bytes: the allocator that counts, and asks for room
#include "records.h"   // values and calls: their life and death
#include "guard.h"     // what a read of an evicted tensor finds that comes past the dispatcher
#include "evict.h"     // memory leaves a value, and comes back
#include "room.h"      // who is evicted, by the policy of the core, as numbers
#include "python_calls.h" // what is asked of Python meanwhile
#include "rules.h"     // what an operator does, by its schema
#include "repeat.h"    // a call runs again
#include "turns.h"     // several threads
#include "sources.h"   // before a source is written; what a history is worth
#include "escapes.h"   // memory that others may write to, or can since an address got out of the dispatcher
#include "forms.h"     // how a call comes
#include "operators.h" // the fallback

}  // namespace

#include "surface.h"   // what Python calls, by ctypes

TORCH_LIBRARY_IMPL(_, Fake, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_operator>()); }

// The commonest of those with small kernels. Each takes the compiler a fifth of a second.
namespace aten = at::_ops;
TORCH_LIBRARY_IMPL(aten, Fake, m) {
  track_as_written<aten::add_Tensor, aten::add__Tensor, aten::addmm, aten::bmm, aten::cat, aten::div_Tensor,
      aten::exp, aten::gelu, aten::mean, aten::mm, aten::mul_Tensor, aten::mul__Tensor, aten::neg,
      aten::pow_Tensor_Scalar, aten::relu, aten::sigmoid, aten::sigmoid_backward, aten::silu, aten::sub_Tensor,
      aten::sum, aten::sum_dim_IntList, aten::tanh, aten::tanh_backward, aten::where_self, aten::_softmax>(m);
}

// What only looks at geometry does not come by: it costs exactly what it costs without a block.
TORCH_LIBRARY_IMPL(aten, Fake, m) {
  for (const char* name : {"view", "t", "transpose.int", "permute", "expand", "unsqueeze", "squeeze.dim", "select.int",
           "slice.Tensor", "detach", "alias", "as_strided", "split.Tensor", "split_with_sizes", "unbind.int",
           "_unsafe_view", "_reshape_alias", "diagonal", "squeeze"})
    m.impl(name, torch::CppFunction::makeFallthrough());
  m.impl("_lazy_clone", [](const at::Tensor& self) { return self.clone(); });  // which shares memory of known kinds alone
}
