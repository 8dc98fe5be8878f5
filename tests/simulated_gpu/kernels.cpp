// Every operator of CUDA tensors, computed by the CPU's kernels in the memory that the tensors have.
//
// Loaded after torch is imported.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/Generator.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

using at::Storage;
using at::Tensor;
using at::TensorImpl;
using c10::DataPtr;
using c10::Device;
using c10::DeviceType;
using c10::DispatchKey;
using c10::IValue;
using Stack = torch::jit::Stack;

static const Device on_gpu(DeviceType::CUDA, 0);
static const Device on_cpu(DeviceType::CPU);
static bool waiting_is_an_error = false;
static bool drawing_is_an_error = false;
static std::atomic<int64_t> allocated{0};

// Tensors of one device in the memory of another.

struct Owner {
  Storage storage;
  int64_t counted;
};

static void release(void* context) {
  auto* owner = static_cast<Owner*>(context);
  allocated -= owner->counted;
  delete owner;
}

static void release_nothing(void*) {}

static Storage storage_on(Device device, Storage given, bool owns, bool counts) {
  size_t bytes = given.nbytes();
  void* memory = given.mutable_data();
  int64_t counted = counts ? static_cast<int64_t>(bytes) : 0;
  allocated += counted;
  DataPtr data = owns ? DataPtr(memory, new Owner{std::move(given), counted}, &release, device)
                      : DataPtr(memory, nullptr, &release_nothing, device);
  return Storage(Storage::use_byte_size_t(), bytes, std::move(data), c10::GetCPUAllocator(), true);
}

static Tensor like(const Tensor& tensor, const Storage& storage, DispatchKey key) {
  Tensor made = at::detail::make_tensor<TensorImpl>(Storage(storage), c10::DispatchKeySet(key), tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  made.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  if (tensor.is_neg()) made._set_neg(true);
  if (tensor.is_conj()) made._set_conj(true);
  return made;
}

// Recording, as CUDA graphs do: what is recorded takes effect when it is replayed, at the addresses that it was given.

struct Recording {
  std::vector<std::function<void()>> steps;
  std::unordered_map<c10::StorageImpl*, Storage> born;                 // while it was recorded: its pool
  std::unordered_map<void*, std::vector<char>> before;                 // what lay at other addresses
  void replay() const {
    for (const auto& step : steps) step();
  }
};
static std::shared_ptr<Recording> recording;

static void note_birth(const Storage& storage) {
  if (recording) recording->born.emplace(storage.unsafeGetStorageImpl(), storage);
}

// A copy from pinned memory that nobody waits for reads it at once or later: here, both.
static std::mutex under_way_lock;
static std::vector<std::pair<Tensor, Tensor>> under_way;

static void finish_copies() {
  std::vector<std::pair<Tensor, Tensor>> copies;
  {
    std::lock_guard<std::mutex> guard(under_way_lock);
    copies.swap(under_way);
  }
  for (auto& [to, from] : copies) to.copy_(from);
}

static void wait_for(const std::string& what) {
  TORCH_CHECK(!recording, "CUDA error: operation not permitted when stream is capturing: ", what);
  TORCH_CHECK(!waiting_is_an_error, "called a synchronizing CUDA operation: ", what);
  finish_copies();
}

static Tensor to_gpu(const Tensor& cpu) {
  if (!cpu.defined()) return cpu;
  Storage storage = storage_on(on_gpu, cpu.storage(), true, true);
  note_birth(storage);
  return like(cpu, storage, DispatchKey::CUDA);
}

// The arguments of one operator, and tensors of the CPU in their memory.
struct Arguments {
  std::unordered_map<TensorImpl*, Tensor> there;
  std::unordered_map<c10::StorageImpl*, Storage> on_host, on_device;
  std::vector<Tensor> given;
  bool any_elsewhere = false;
  std::string elsewhere;

  Tensor take(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      if (tensor.dim() > 0 && tensor.is_cpu()) {
        any_elsewhere = true;
        elsewhere = c10::str(tensor.sizes(), " of ", tensor.dtype());
      }
      return tensor;
    }
    auto known = there.find(tensor.unsafeGetTensorImpl());
    if (known != there.end()) return known->second;
    given.push_back(tensor);
    auto* key = tensor.storage().unsafeGetStorageImpl();
    auto found = on_host.find(key);
    if (found == on_host.end()) {
      bool owns = !recording || recording->born.count(key) > 0;
      if (!owns && !recording->before.count(key->mutable_data())) {
        auto* bytes = static_cast<char*>(key->mutable_data());
        recording->before.emplace(bytes, std::vector<char>(bytes, bytes + key->nbytes()));
      }
      Storage storage = storage_on(on_cpu, tensor.storage(), owns, false);
      on_device.emplace(storage.unsafeGetStorageImpl(), tensor.storage());
      found = on_host.emplace(key, storage).first;
    }
    Tensor made = like(tensor, found->second, DispatchKey::CPU);
    there.emplace(tensor.unsafeGetTensorImpl(), made);
    return made;
  }

  // An operator that writes to its argument may have given it more memory, or another shape.
  void take_over() {
    for (auto& [device, host] : on_host) {
      if (host.nbytes() == device->nbytes() && host.data() == device->data()) continue;
      TORCH_CHECK(!recording || recording->born.count(device), "memory was resized while it was recorded");
      size_t bytes = host.nbytes();
      void* memory = host.mutable_data();
      device->set_data_ptr_noswap(DataPtr(memory, new Owner{host, 0}, &release, on_gpu));
      device->set_nbytes(bytes);
    }
  }

  Tensor give(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    for (auto& each : given) {
      if (!there[each.unsafeGetTensorImpl()].is_same(tensor)) continue;
      each.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
      each.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
      return each;
    }
    auto found = on_device.find(tensor.storage().unsafeGetStorageImpl());
    return found == on_device.end() ? to_gpu(tensor) : like(tensor, found->second, DispatchKey::CUDA);
  }

  bool is_new(const Tensor& tensor) const {
    return tensor.defined() && !on_device.count(tensor.storage().unsafeGetStorageImpl());
  }
};

static void each_tensor(IValue& value, const std::function<Tensor(const Tensor&)>& function) {
  if (value.isTensor()) {
    value = function(value.toTensor());
  } else if (value.isTensorList()) {
    std::vector<Tensor> found;
    for (const Tensor& tensor : value.toTensorVector()) found.push_back(function(tensor));
    value = c10::List<Tensor>(found);
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> found;
    for (std::optional<Tensor> tensor : value.toOptionalTensorList())
      found.push_back(tensor.has_value() ? std::optional<Tensor>(function(*tensor)) : tensor);
    value = found;
  }
}

// Where tensors of both devices may meet: an index on the host is copied.
static const std::unordered_set<std::string> meeting = {"aten::index", "aten::index_put_", "aten::_index_put_impl_"};
// What is known after the host has looked at numbers.
static const std::unordered_set<std::string> looking = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::_local_scalar_dense",
    "aten::equal",   "aten::bincount"};

// What has no deterministic kernel on a GPU, and the names by which torch says so.
static const std::unordered_map<std::string, std::string> nondeterministic = {
    {"aten::nll_loss2d_forward", "nll_loss2d_forward_out_cuda_template"},
    {"aten::nll_loss2d_backward", "nll_loss2d_backward_out_cuda_template"},
    {"aten::_adaptive_avg_pool2d_backward", "adaptive_avg_pool2d_backward_cuda"},
    {"aten::max_pool3d_with_indices_backward", "max_pool3d_with_indices_backward_cuda"}};

static void draw() {
  TORCH_CHECK(!drawing_is_an_error, "Offset increment outside graph capture encountered unexpectedly.");
}

static void compute(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = schema.operator_name().name;
  if (looking.count(name)) wait_for(name);
  if (name == "aten::native_dropout") draw();
  auto unsteady = nondeterministic.find(name);
  if (unsteady != nondeterministic.end()) at::globalContext().alertNotDeterministic(unsteady->second);
  Arguments arguments;
  bool to_host = false;
  size_t begin = stack->size() - schema.arguments().size();
  if ((name == "aten::_softmax" || name == "aten::_log_softmax") && (*stack)[begin + 2].toBool()) {
    // Under autocast a GPU computes that of half precision in float32 in one kernel, and a CPU has none for it.
    (*stack)[begin] = (*stack)[begin].toTensor().to(at::kFloat);
    (*stack)[begin + 2] = false;
  }
  if (name == "aten::_softmax_backward_data" || name == "aten::_log_softmax_backward_data") {
    at::ScalarType given = (*stack)[begin].toTensor().scalar_type(), wanted = (*stack)[begin + 3].toScalarType();
    if (given != wanted) {  // torch calls the form that writes to a tensor
      Tensor out = (*stack)[begin + 4].toTensor();
      (*stack)[begin + 3] = given;
      (*stack)[begin + 4] = at::empty_like(out, out.options().dtype(given));
      compute(op, keys, stack);
      out.copy_(stack->back().toTensor());
      stack->back() = out;
      return;
    }
  }
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    IValue& value = (*stack)[begin + i];
    if (value.isDevice()) {
      to_host = !value.toDevice().is_cuda();
      value = on_cpu;
    } else if (value.isNone() && schema.arguments()[i].type()->str() == "Generator?") {
      draw();
      value = at::detail::getCUDAHooks().getDefaultGenerator(0);
    } else {
      bool indices = value.isOptionalTensorList();
      each_tensor(value, [&](const Tensor& tensor) {
        TORCH_CHECK_NOT_IMPLEMENTED(
            name != "aten::_amp_foreach_non_finite_check_and_unscale_" || tensor.scalar_type() != at::kBFloat16,
            "\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'");
        if (indices && tensor.defined() && tensor.scalar_type() == at::kBool) wait_for(name + " by a mask");
        return arguments.take(tensor);
      });
    }
  }
  TORCH_CHECK(
      arguments.given.empty() || !arguments.any_elsewhere || meeting.count(name),
      "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (", name, ", ",
      arguments.elsewhere, ")");
  Stack taken(stack->begin() + static_cast<int64_t>(begin), stack->end());
  op.callBoxed(stack);
  arguments.take_over();
  if (name == "aten::_local_scalar_dense" || to_host) return;
  std::vector<Tensor> made;
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++) {
    each_tensor((*stack)[i], [&](const Tensor& tensor) {
      made.push_back(arguments.is_new(tensor) ? tensor : Tensor());
      return arguments.give(tensor);
    });
  }
  if (!recording) return;
  recording->steps.push_back([op, taken, made, count = schema.returns().size()] {
    Stack again = taken;
    op.callBoxed(&again);
    size_t next = 0;
    for (size_t i = again.size() - count; i < again.size(); i++) {
      each_tensor(again[i], [&](const Tensor& tensor) {
        const Tensor& held = made[next++];
        if (held.defined()) held.view(held.sizes()).copy_(tensor);
        return tensor;
      });
    }
  });
}

static Tensor& copy_(Tensor& self, const Tensor& other, bool non_blocking) {
  if (self.is_cuda() != other.is_cuda() && self.numel() > 0) {
    bool pinned = (self.is_cpu() ? self : other).is_pinned();
    if (recording || !non_blocking || !pinned) wait_for(self.is_cuda() ? "a copy to the device" : "a copy to the host");
  }
  Arguments arguments;
  Tensor to = arguments.take(self), from = arguments.take(other);
  if (self.is_cuda() && other.is_cpu() && other.numel() > 0 && non_blocking && other.is_pinned()) {
    finish_copies();
    std::lock_guard<std::mutex> guard(under_way_lock);
    under_way.emplace_back(to, from);
  }
  to.copy_(from);
  if (recording) recording->steps.push_back([to, from] { to.copy_(from); });
  return self;
}

static Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return to_gpu(at::empty(size, at::TensorOptions().dtype(dtype).device(on_cpu), format));
}

static Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device>, std::optional<bool>) {
  return to_gpu(at::empty_strided(size, stride, at::TensorOptions().dtype(dtype).device(on_cpu)));
}

static Tensor& set_storage(
    Tensor& self, Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  return self;
}

static Tensor& set_tensor(Tensor& self, const Tensor& other) {
  return set_storage(self, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  // Those whose way through `out=` resizes it on the CPU, with a warning.
  for (const char* name : {"mse_loss", "smooth_l1_loss", "huber_loss"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&compute>());
  library.impl("copy_", copy_);
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Tensor", set_tensor);
}

static void begin() { recording = std::make_shared<Recording>(); }

static std::shared_ptr<Recording> end() {
  auto made = std::move(recording);
  recording = nullptr;
  // What was recorded has not run.
  for (auto& [address, bytes] : made->before) std::memcpy(address, bytes.data(), bytes.size());
  return made;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("refuse_waiting", [](bool refuse) { waiting_is_an_error = refuse; });
  module.def("refuse_drawing", [](bool refuse) { drawing_is_an_error = refuse; });
  module.def("finish_copies", &finish_copies);
  module.def("allocated", [] { return allocated.load(); });
  module.def("generator", [] {
    return py::reinterpret_steal<py::object>(THPGenerator_Wrap(at::detail::getCUDAHooks().getDefaultGenerator(0)));
  });
  py::class_<Recording, std::shared_ptr<Recording>>(module, "Recording").def("replay", &Recording::replay);
  module.def("begin", &begin);
  module.def("end", &end);
}
