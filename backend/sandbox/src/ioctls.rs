//! The requests of NVIDIA's kernel modules, as data: name, number, the branches that have it, and the processes that may make it.
//!
//! The numbers are facts of the published kernel modules (`github.com/NVIDIA/open-gpu-kernel-modules`), read at the releases of
//! [`BRANCHES`]: `nv-ioctl-numbers.h`, `nv-ioctl-numa.h` and `nv_escape.h` for `/dev/nvidiactl` and `/dev/nvidiaN`,
//! `uvm_ioctl.h` and `uvm_linux_ioctl.h` for `/dev/nvidia-uvm`. The capability nodes (`/dev/nvidia-caps`) have no requests.
//! `cargo xtask ioctls TAG` compares the table with a release. Requests that a CUDA program needs are those that gVisor's
//! `nvproxy` passes on for compute programs, with the exceptions that the groups state. A trace of 580.159 on an H100 found no other one.
//!
//! The commands inside `NV_ESC_RM_CONTROL` and the classes inside `NV_ESC_RM_ALLOC` lie behind a pointer, which a filter cannot
//! read: they are not filtered.

/// Branches with a list, and the release at which its requests were read.
pub const BRANCHES: [(u16, &str); 7] = [
    (535, "535.288.01"),
    (550, "550.163.01"),
    (570, "570.211.01"),
    (575, "575.64.05"),
    (580, "580.142"),
    (590, "590.48.01"),
    (595, "595.45.04"),
];

/// A process that loads NVIDIA's driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriverUser {
    /// `sluice-worker`.
    Worker,
    /// `sluice-arbiter`.
    Arbiter,
    /// `sluice-inventory`.
    Inventory,
}

/// The number of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RequestNumber {
    /// Of `/dev/nvidiactl` and `/dev/nvidiaN`: the lowest byte of a command that also carries the size of its argument. The size
    /// differs between releases, and the module checks it.
    Escape(u8),
    /// Of `/dev/nvidia-uvm`: the whole command.
    Uvm(u32),
}

/// A request.
#[derive(Clone, Copy, Debug)]
pub struct IoctlRequest {
    /// Its name in the headers.
    pub name: &'static str,
    /// Its number.
    pub number: RequestNumber,
    /// The first branch of the table that has it.
    pub since: u16,
    /// The last branch of the table that has it.
    pub until: u16,
}

impl IoctlRequest {
    const fn since(self, branch: u16) -> IoctlRequest {
        IoctlRequest { since: branch, ..self }
    }

    const fn until(self, branch: u16) -> IoctlRequest {
        IoctlRequest { until: branch, ..self }
    }

    /// True if the branch has it.
    #[must_use]
    pub const fn is_in(&self, branch: u16) -> bool {
        self.since <= branch && branch <= self.until
    }
}

/// Requests with the same users, for the same reason.
#[derive(Clone, Copy, Debug)]
pub struct IoctlGroup {
    /// The processes that may make them.
    pub users: &'static [DriverUser],
    /// The reason why these processes may, or why none may.
    pub why: &'static str,
    /// The requests.
    pub requests: &'static [IoctlRequest],
}

const fn escape(name: &'static str, number: u8) -> IoctlRequest {
    IoctlRequest { name, number: RequestNumber::Escape(number), since: 0, until: u16::MAX }
}

const fn uvm(name: &'static str, number: u32) -> IoctlRequest {
    IoctlRequest { name, number: RequestNumber::Uvm(number), since: 0, until: u16::MAX }
}

const ALL: &[DriverUser] = &[DriverUser::Worker, DriverUser::Arbiter, DriverUser::Inventory];
const CUDA: &[DriverUser] = &[DriverUser::Worker, DriverUser::Arbiter];
const NONE: &[DriverUser] = &[];

/// All requests, the most frequent ones first: a filter compares in this order.
pub const GROUPS: &[IoctlGroup] = &[
    IoctlGroup {
        users: ALL,
        why: "objects of the resource manager: queries, contexts, memory, sharing by handle",
        requests: &[
            escape("NV_ESC_RM_CONTROL", 0x2a),
            escape("NV_ESC_RM_ALLOC", 0x2b),
            escape("NV_ESC_RM_FREE", 0x29),
            escape("NV_ESC_RM_MAP_MEMORY", 0x4e),
            escape("NV_ESC_RM_UNMAP_MEMORY", 0x4f),
            escape("NV_ESC_RM_ALLOC_MEMORY", 0x27),
            escape("NV_ESC_RM_VID_HEAP_CONTROL", 0x4a),
            escape("NV_ESC_RM_DUP_OBJECT", 0x34),
            escape("NV_ESC_RM_SHARE", 0x35),
            escape("NV_ESC_RM_UPDATE_DEVICE_MAPPING_INFO", 0x5e),
        ],
    },
    IoctlGroup {
        users: ALL,
        why: "start of a library: versions, the list of GPUs, opened devices, events of its own",
        requests: &[
            escape("NV_ESC_CARD_INFO", 200),
            escape("NV_ESC_REGISTER_FD", 201),
            escape("NV_ESC_ALLOC_OS_EVENT", 206),
            escape("NV_ESC_FREE_OS_EVENT", 207),
            escape("NV_ESC_CHECK_VERSION_STR", 210),
            escape("NV_ESC_ATTACH_GPUS_TO_FD", 212),
            escape("NV_ESC_SYS_PARAMS", 214),
            escape("NV_ESC_NUMA_INFO", 215),
            escape("NV_ESC_WAIT_OPEN_COMPLETE", 218).since(550),
        ],
    },
    IoctlGroup {
        users: &[DriverUser::Inventory],
        why: "errors of devices, for which the inventory waits; without it nvmlEventSetWait fails with 17 (seen with 580.159 on an H100)",
        requests: &[escape("NV_ESC_RM_GET_EVENT_DATA", 0x52)],
    },
    IoctlGroup {
        users: CUDA,
        why: "the process's own address space on its GPUs",
        requests: &[
            uvm("UVM_MAP_EXTERNAL_ALLOCATION", 33),
            uvm("UVM_UNMAP_EXTERNAL", 66),
            uvm("UVM_CREATE_EXTERNAL_RANGE", 73),
            uvm("UVM_FREE", 34),
            uvm("UVM_VALIDATE_VA_RANGE", 72),
            uvm("UVM_INITIALIZE", 0x3000_0001),
            uvm("UVM_DEINITIALIZE", 0x3000_0002),
            uvm("UVM_MM_INITIALIZE", 75),
            uvm("UVM_REGISTER_GPU", 37),
            uvm("UVM_UNREGISTER_GPU", 38),
            uvm("UVM_REGISTER_GPU_VASPACE", 25),
            uvm("UVM_UNREGISTER_GPU_VASPACE", 26),
            uvm("UVM_REGISTER_CHANNEL", 27),
            uvm("UVM_UNREGISTER_CHANNEL", 28),
            uvm("UVM_ENABLE_PEER_ACCESS", 29),
            uvm("UVM_DISABLE_PEER_ACCESS", 30),
            uvm("UVM_ALLOC_SEMAPHORE_POOL", 68),
            uvm("UVM_MAP_DYNAMIC_PARALLELISM_REGION", 65),
            uvm("UVM_CREATE_RANGE_GROUP", 23),
            uvm("UVM_DESTROY_RANGE_GROUP", 24),
            uvm("UVM_SET_RANGE_GROUP", 31),
            uvm("UVM_SET_PREFERRED_LOCATION", 42),
            uvm("UVM_UNSET_PREFERRED_LOCATION", 43),
            uvm("UVM_ENABLE_READ_DUPLICATION", 44),
            uvm("UVM_DISABLE_READ_DUPLICATION", 45),
            uvm("UVM_SET_ACCESSED_BY", 46),
            uvm("UVM_UNSET_ACCESSED_BY", 47),
            uvm("UVM_MIGRATE", 51),
            uvm("UVM_MIGRATE_RANGE_GROUP", 53),
        ],
    },
    IoctlGroup {
        users: CUDA,
        why: "queries whether GPUs reach host memory; nvproxy passes the second for video only, but the arbiter's refusal to \
              share such a host rests on the answer",
        requests: &[uvm("UVM_PAGEABLE_MEM_ACCESS", 39), uvm("UVM_PAGEABLE_MEM_ACCESS_ON_GPU", 70)],
    },
    IoctlGroup {
        users: NONE,
        why: "carries another request behind a pointer: with it, no list would hold",
        requests: &[escape("NV_ESC_IOCTL_XFER_CMD", 211)],
    },
    IoctlGroup {
        users: NONE,
        why: "settings of the module or the board, registers, diagnostics of all processes, memory nodes of the host",
        requests: &[
            escape("NV_ESC_RM_CONFIG_GET", 0x32).until(590),
            escape("NV_ESC_RM_CONFIG_SET", 0x33).until(590),
            escape("NV_ESC_RM_CONFIG_GET_EX", 0x37).until(590),
            escape("NV_ESC_RM_CONFIG_SET_EX", 0x38).until(590),
            escape("NV_ESC_RM_I2C_ACCESS", 0x39),
            escape("NV_ESC_RM_ACCESS_REGISTRY", 0x4d),
            escape("NV_ESC_RM_NVLOG_CTRL", 0x5f).until(535),
            escape("NV_ESC_RM_LOCKLESS_DIAGNOSTIC", 0x5f).since(550),
            escape("NV_ESC_STATUS_CODE", 209),
            escape("NV_ESC_QUERY_DEVICE_INTR", 213),
            escape("NV_ESC_SET_NUMA_STATUS", 216),
        ],
    },
    IoctlGroup {
        users: NONE,
        why: "graphics, older interfaces, memory for network cards: nvproxy passes none of them for compute programs",
        requests: &[
            escape("NV_ESC_RM_ALLOC_OBJECT", 0x28),
            escape("NV_ESC_RM_IDLE_CHANNELS", 0x41),
            escape("NV_ESC_RM_ALLOC_CONTEXT_DMA2", 0x54),
            escape("NV_ESC_RM_ADD_VBLANK_CALLBACK", 0x56),
            escape("NV_ESC_RM_MAP_MEMORY_DMA", 0x57),
            escape("NV_ESC_RM_UNMAP_MEMORY_DMA", 0x58),
            escape("NV_ESC_RM_BIND_CONTEXT_DMA", 0x59),
            escape("NV_ESC_RM_EXPORT_OBJECT_TO_FD", 0x5c),
            escape("NV_ESC_RM_IMPORT_OBJECT_FROM_FD", 0x5d),
            escape("NV_ESC_EXPORT_TO_DMABUF_FD", 217),
            uvm("UVM_ALLOC_DEVICE_P2P", 78).since(570),
        ],
    },
    IoctlGroup {
        users: NONE,
        why: "tools that observe, count, read or write other processes",
        requests: &[
            uvm("UVM_DEBUG_ACCESS_MEMORY", 36).until(570),
            uvm("UVM_TOOLS_INIT_EVENT_TRACKER", 56),
            uvm("UVM_TOOLS_SET_NOTIFICATION_THRESHOLD", 57),
            uvm("UVM_TOOLS_EVENT_QUEUE_ENABLE_EVENTS", 58),
            uvm("UVM_TOOLS_EVENT_QUEUE_DISABLE_EVENTS", 59),
            uvm("UVM_TOOLS_ENABLE_COUNTERS", 60),
            uvm("UVM_TOOLS_DISABLE_COUNTERS", 61),
            uvm("UVM_TOOLS_READ_PROCESS_MEMORY", 62),
            uvm("UVM_TOOLS_WRITE_PROCESS_MEMORY", 63),
            uvm("UVM_TOOLS_GET_PROCESSOR_UUID_TABLE", 64),
            uvm("UVM_TOOLS_FLUSH_EVENTS", 67),
            uvm("UVM_TOOLS_INIT_EVENT_TRACKER_V2", 76).since(570),
            uvm("UVM_TOOLS_GET_PROCESSOR_UUID_TABLE_V2", 77).since(570),
            uvm("UVM_ADD_SESSION", 10),
            uvm("UVM_REMOVE_SESSION", 11).until(580),
            uvm("UVM_ENABLE_COUNTERS", 12),
            uvm("UVM_MAP_COUNTER", 13),
            uvm("UVM_CREATE_EVENT_QUEUE", 14),
            uvm("UVM_REMOVE_EVENT_QUEUE", 15),
            uvm("UVM_MAP_EVENT_QUEUE", 16),
            uvm("UVM_EVENT_CTRL", 17),
            uvm("UVM_CLEAR_ALL_ACCESS_COUNTERS", 79).since(570),
            uvm("UVM_CLEAN_UP_ZOMBIE_RESOURCES", 69),
            uvm("UVM_RUN_TEST", 9).until(580),
        ],
    },
    IoctlGroup {
        users: NONE,
        why: "the multi-process service, and interfaces that nvproxy passes to no compute program",
        requests: &[
            uvm("UVM_REGISTER_MPS_SERVER", 18).until(580),
            uvm("UVM_REGISTER_MPS_CLIENT", 19).until(580),
            uvm("UVM_RESERVE_VA", 1),
            uvm("UVM_RELEASE_VA", 2),
            uvm("UVM_REGION_COMMIT", 3),
            uvm("UVM_REGION_DECOMMIT", 4),
            uvm("UVM_REGION_SET_STREAM", 5),
            uvm("UVM_SET_STREAM_RUNNING", 6),
            uvm("UVM_SET_STREAM_STOPPED", 7),
            uvm("UVM_GET_GPU_UUID_TABLE", 20),
            uvm("UVM_REGION_SET_BACKING", 21),
            uvm("UVM_REGION_UNSET_BACKING", 22),
            uvm("UVM_MEM_MAP", 35),
            uvm("UVM_PREVENT_MIGRATION_RANGE_GROUPS", 40),
            uvm("UVM_ALLOW_MIGRATION_RANGE_GROUPS", 41),
            uvm("UVM_ENABLE_SYSTEM_WIDE_ATOMICS", 54).until(590),
            uvm("UVM_DISABLE_SYSTEM_WIDE_ATOMICS", 55).until(590),
            uvm("UVM_POPULATE_PAGEABLE", 71),
            uvm("UVM_MAP_EXTERNAL_SPARSE", 74),
            uvm("UVM_DISCARD", 80).since(580),
            uvm("UVM_IS_8_SUPPORTED", 2047),
        ],
    },
];

/// The requests of a branch.
pub fn of_branch(branch: u16) -> impl Iterator<Item = (&'static IoctlGroup, &'static IoctlRequest)> {
    GROUPS
        .iter()
        .flat_map(|group| group.requests.iter().map(move |request| (group, request)))
        .filter(move |(_, request)| request.is_in(branch))
}

/// The requests that a process may make with a driver of a branch.
pub(crate) fn allowed(branch: u16, user: DriverUser) -> impl Iterator<Item = RequestNumber> {
    of_branch(branch).filter(move |(group, _)| group.users.contains(&user)).map(|(_, request)| request.number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn name_and_number_of_a_branch_stand_once() {
        for (branch, _) in BRANCHES {
            let (mut names, mut numbers) = (HashSet::new(), HashSet::new());
            for (_, request) in of_branch(branch) {
                assert!(names.insert(request.name), "{branch}: {}", request.name);
                let number = match request.number {
                    RequestNumber::Escape(number) => (true, u32::from(number)),
                    RequestNumber::Uvm(number) => (false, number),
                };
                assert!(numbers.insert(number), "{branch}: {}", request.name);
            }
        }
    }

    #[test]
    fn since_and_until_are_branches_with_a_list() {
        let is_listed = |branch: u16| BRANCHES.iter().any(|(listed, _)| *listed == branch);
        for request in GROUPS.iter().flat_map(|group| group.requests) {
            assert!(request.since == 0 || is_listed(request.since), "{}", request.name);
            assert!(request.until == u16::MAX || is_listed(request.until), "{}", request.name);
        }
    }

    // Promise: F110
    #[test]
    fn inventory_reaches_no_address_space_and_no_process_reaches_tools() {
        for (branch, _) in BRANCHES {
            let of_inventory = allowed(branch, DriverUser::Inventory);
            assert!(of_inventory.into_iter().all(|number| matches!(number, RequestNumber::Escape(_))));
            for user in [DriverUser::Worker, DriverUser::Arbiter, DriverUser::Inventory] {
                let allowed: Vec<_> = allowed(branch, user).collect();
                assert!(!allowed.contains(&RequestNumber::Escape(211)), "NV_ESC_IOCTL_XFER_CMD");
                let tools = of_branch(branch).filter(|(_, request)| request.name.contains("_TOOLS_"));
                assert!(tools.into_iter().all(|(_, tool)| !allowed.contains(&tool.number)));
            }
        }
    }
}
