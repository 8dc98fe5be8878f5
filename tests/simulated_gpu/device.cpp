// What torch asks of a CUDA build: a device, its streams and events, random numbers, and pinned memory.
//
// Loaded before torch is imported: torch asks once, while it is.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <Python.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>
#include <mutex>
#include <set>

namespace c10::impl {

struct Guard final : NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static Device here() { return Device(DeviceType::CUDA, 0); }
  static Stream stream() { return Stream(Stream::DEFAULT, here()); }
  Device exchangeDevice(Device) const override { return here(); }
  Device getDevice() const override { return here(); }
  Stream getStream(Device) const noexcept override { return stream(); }
  Stream getNewStream(Device, int) const override { return stream(); }
  Stream exchangeStream(Stream) const noexcept override { return stream(); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 1.0; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

}  // namespace c10::impl

namespace at {

static std::mutex pinned_lock;
static std::set<const void*> pinned;

static void release_pinned(void* memory) {
  {
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned.erase(memory);
  }
  std::free(memory);
}

struct PinnedMemory final : Allocator {
  DataPtr allocate(size_t bytes) override {
    void* memory = std::aligned_alloc(64, (bytes + 127) / 64 * 64);
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned.insert(memory);
    return {memory, memory, &release_pinned, Device(DeviceType::CPU)};
  }
  DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

// torch looks it up by this name.
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void deviceSynchronize(DeviceIndex) const override {}
  bool isPinnedPtr(const void* memory) const override {
    std::lock_guard<std::mutex> guard(pinned_lock);
    return pinned.count(memory) > 0;
  }
  Allocator* getPinnedMemoryAllocator() const override {
    static PinnedMemory allocator;
    return &allocator;
  }
  const Generator& getDefaultGenerator(DeviceIndex) const override {
    static Generator generator = detail::createCPUGenerator();
    return generator;
  }
  Generator getNewGenerator(DeviceIndex) const override { return detail::createCPUGenerator(); }
};
REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "device", nullptr, -1, nullptr};

PyMODINIT_FUNC PyInit_device() { return PyModule_Create(&definition); }
