//! Device attributes whose true value a guest must not get.
//!
//! The rule: no call is refused while an attribute reports that it works. Every attribute listed here belongs to an area that
//! guests do not support; all others pass on the driver's value.

use crate::sys::CUdevice_attribute as Attribute;

/// The value of attributes that name a NUMA node: none.
const NO_NODE: i32 = -1;

/// The bit of descriptors among the types of handles of pools (`CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`).
const POSIX_DESCRIPTORS: i32 = 1;

/// Sharing of streams with Vulkan: CUDA 13.5 has this attribute, the types used here do not.
const VULKAN_CIG_STREAMS_SUPPORTED: i32 = 159;
const VULKAN_CIG_STREAMS: Mask = Mask {
    attribute: VULKAN_CIG_STREAMS_SUPPORTED,
    name: "CU_DEVICE_ATTRIBUTE_VULKAN_CIG_STREAMS_SUPPORTED",
    value: 0,
    ability: "streams shared with a graphics API",
};

/// The value of a device attribute that guests get instead of the driver's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mask {
    /// Number of the attribute.
    pub attribute: i32,
    /// Its name.
    pub name: &'static str,
    /// Its value in a guest.
    pub value: i32,
    /// The ability that guests do not have.
    pub ability: &'static str,
}

macro_rules! masks {
    ($($ability:literal: $value:expr => $($name:ident)|+;)*) => {
        /// All masked attributes.
        pub const MASKS: &[Mask] = &[
            $($(Mask {
                attribute: Attribute::$name as i32,
                name: stringify!($name),
                value: $value,
                ability: $ability,
            },)+)*
            VULKAN_CIG_STREAMS,
        ];

        /// The value that a guest gets for `attribute` instead of the driver's; `None` passes on the driver's value.
        pub const fn guest_mask(attribute: i32) -> Option<i32> {
            $($(const $name: i32 = Attribute::$name as i32;)+)*
            match attribute {
                $($($name)|+ => Some($value),)*
                VULKAN_CIG_STREAMS_SUPPORTED => Some(0),
                _ => None,
            }
        }
    };
}

/// True for an attribute that reports that kernels access host memory in place. That is false in a guest that shares no memory
/// with the host.
pub const fn reaches_host_memory(attribute: i32) -> bool {
    const CAN_MAP: i32 = Attribute::CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY as i32;
    const UNIFIED: i32 = Attribute::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING as i32;
    const MANAGED: i32 = Attribute::CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY as i32;
    const ATOMICS: i32 = Attribute::CU_DEVICE_ATTRIBUTE_HOST_NATIVE_ATOMIC_SUPPORTED as i32;
    matches!(attribute, CAN_MAP | UNIFIED | MANAGED | ATOMICS)
}

/// Corrects attributes that hold for a guest only together with another. Its managed memory is host memory that devices reach in place,
/// so host and device share it while a kernel runs only if atomic operations of the device on host memory are native.
pub fn correct_dependent(attributes: &mut [i32]) {
    const ATOMICS: usize = Attribute::CU_DEVICE_ATTRIBUTE_HOST_NATIVE_ATOMIC_SUPPORTED as usize;
    const SHARED: usize = Attribute::CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS as usize;
    let native = attributes.get(ATOMICS).is_some_and(|value| *value != 0);
    if let Some(shared) = attributes.get_mut(SHARED).filter(|_| !native) {
        *shared = 0;
    }
}

/// True for the attribute that reports that the program's own memory can be pinned. That is false in a guest whose kernel cannot
/// replace pages under the program's threads, or whose memory the device does not reach.
pub const fn registers_host_memory(attribute: i32) -> bool {
    attribute == Attribute::CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED as i32
}

masks! {
    "external semaphores": 0 => CU_DEVICE_ATTRIBUTE_TIMELINE_SEMAPHORE_INTEROP_SUPPORTED;
    "streams shared with a graphics API": 0 => CU_DEVICE_ATTRIBUTE_D3D12_CIG_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_D3D12_CIG_STREAMS_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_VULKAN_CIG_SUPPORTED;
    "GPUDirect RDMA, DMA-BUF, flushing of remote writes": 0 => CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES
        | CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS
        | CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING
        | CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_LOCALIZED_MEMORY_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_DMA_BUF_MMAP_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_HOST_ALLOC_DMA_BUF_SUPPORTED;
    "multicast objects, fabric handles, logical endpoints": 0 => CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_LOGICAL_ENDPOINT_UNICAST_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_LOGICAL_ENDPOINT_MULTICAST_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_LOGICAL_ENDPOINT_COUNTED_OPS_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_LOGICAL_ENDPOINT_UNICAST_ACCESS_ON_OWNER_DEVICE_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_LOGICAL_ENDPOINT_SUPPORTED_HANDLE_TYPES;
    "Win32 handles, and host memory behind the virtual-memory API and the pools": 0 => CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_WIN32_HANDLE_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_WIN32_KMT_HANDLE_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_HOST_NUMA_MEMORY_POOLS_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_HOST_NUMA_MULTINODE_IPC_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_HOST_MEMORY_POOLS_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_NUMA_CONFIG;
    "a NUMA node": NO_NODE => CU_DEVICE_ATTRIBUTE_NUMA_ID
        | CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID;
    "pageable and read-only host memory, registered memory at its own address, memory of the device that the host reaches": 0 => CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS
        | CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
        | CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES
        | CU_DEVICE_ATTRIBUTE_DIRECT_MANAGED_MEM_ACCESS_FROM_HOST
        | CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED;
    "launches over several devices": 0 => CU_DEVICE_ATTRIBUTE_COOPERATIVE_MULTI_DEVICE_LAUNCH;
    "pools shared by other handles than descriptors": POSIX_DESCRIPTORS => CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES;
    "sparse and deferred-mapping arrays": 0 => CU_DEVICE_ATTRIBUTE_SPARSE_CUDA_ARRAY_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_DEFERRED_MAPPING_CUDA_ARRAY_SUPPORTED;
    "compressible memory, decompression, locality domains, MPS, groups of boards": 0 => CU_DEVICE_ATTRIBUTE_GENERIC_COMPRESSION_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_MEM_DECOMPRESS_ALGORITHM_MASK
        | CU_DEVICE_ATTRIBUTE_MEM_DECOMPRESS_MAXIMUM_LENGTH
        | CU_DEVICE_ATTRIBUTE_LOCALITY_DOMAIN_COUNT
        | CU_DEVICE_ATTRIBUTE_LOCALITY_DOMAIN_MULTIPROCESSOR_COUNT
        | CU_DEVICE_ATTRIBUTE_MPS_ENABLED
        | CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD
        | CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD_GROUP_ID;
    "pointers to functions that are the same on all devices": 0 => CU_DEVICE_ATTRIBUTE_UNIFIED_FUNCTION_POINTERS;
}
