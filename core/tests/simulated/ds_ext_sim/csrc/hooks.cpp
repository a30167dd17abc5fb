// What torch asks of a device besides operators: generators, page-locked memory, whose an address is.

#include "hooks.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>

#include <array>

#include "memory.h"
#include "queues.h"
#include "tensors.h"

namespace sim {

namespace {

// Draws from a generator of the host, so that a seed gives the numbers that it gives there.
struct SimGenerator final : c10::GeneratorImpl {
    at::Generator host;

    SimGenerator(int device, at::Generator drawn_from)
        : GeneratorImpl(device_at(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
          host(std::move(drawn_from)) {}

    void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
    void set_offset(uint64_t offset) override { host.set_offset(offset); }
    uint64_t get_offset() const override { return host.get_offset(); }
    uint64_t current_seed() const override { return host.current_seed(); }
    uint64_t seed() override { return at::Generator(host).seed(); }
    void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
    c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
        return host.unsafeGetGeneratorImpl()->get_state();
    }
    SimGenerator* clone_impl() const override { return new SimGenerator(device().index(), host.clone()); }
};

int index_or_current(c10::DeviceIndex index) { return index < 0 ? current_device() : index; }

struct SimHooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return device_count() > 0; }
    bool hasPrimaryContext(c10::DeviceIndex index) const override { return was_used(index); }
    c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count()); }
    void setCurrentDevice(c10::DeviceIndex index) const override { set_device(index); }
    c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
        const int before = current_device();
        if (index >= 0) set_device(index);
        return static_cast<c10::DeviceIndex>(before);
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }

    bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
    c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
    c10::Device getDeviceFromPtr(void* address) const override {
        const int device = device_of(address);
        TORCH_CHECK(device >= 0, "this is no address of a simulated device");
        return device_at(device);
    }

    const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
        return default_generator(index_or_current(index));
    }
    at::Generator getNewGenerator(c10::DeviceIndex index) const override {
        return at::make_generator<SimGenerator>(index_or_current(index), at::detail::createCPUGenerator());
    }

    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
        if (num_bytes >= storage.nbytes()) {
            grow(storage, num_bytes);
        } else {
            storage.set_nbytes(num_bytes);
            if (num_bytes == 0) storage.set_data_ptr_noswap(storage.allocator()->allocate(0));
        }
    }
};

const bool hooks_registered = [] {
    at::RegisterPrivateUse1HooksInterface(new SimHooks());
    return true;
}();

}  // namespace

const at::Generator& default_generator(int device) {
    static auto* generators = [] {
        auto* made = new std::array<at::Generator, kMaxDevices>();
        for (int index = 0; index < kMaxDevices; ++index) {
            (*made)[index] = at::make_generator<SimGenerator>(index, at::detail::createCPUGenerator());
        }
        return made;
    }();
    TORCH_CHECK(device >= 0 && device < device_count(), device_at(device), " does not exist");
    return (*generators)[device];
}

at::Generator host_generator(const at::Generator& generator) { return generator.get<SimGenerator>()->host; }

}  // namespace sim
