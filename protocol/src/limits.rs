//! Every bound on a guest's requests, and the times on which processes agree, in one place.
//!
//! Nothing in the backend is allocated, looped over or kept because of a number that came from a guest unless that number was
//! compared with a constant of this page first.

/// Bytes of the ring of one session.
pub const RING_BYTES: u64 = 1 << 20;
/// Bytes of one record, header included. A kernel's parameters are at most 32,764 bytes on any architecture.
pub const RECORD_BYTES: usize = 40 << 10;
/// Reply slots of one session: guest threads that may wait for an answer at once.
pub const REPLY_SLOTS: u32 = 128;
/// Bytes of one reply slot, header included.
pub const REPLY_SLOT_BYTES: usize = 2048;
/// Bytes an answer may carry.
pub const REPLY_BYTES: usize = REPLY_SLOT_BYTES - 16;
/// Streams of one session, default streams of contexts and threads included.
pub const STREAMS: u32 = 1024;
/// Events of one session.
pub const EVENTS: u32 = 1 << 16;
/// Executable graphs of one session: the driver keeps some KiB of the worker's memory for each.
pub const GRAPH_EXECUTABLES: u32 = 1 << 14;
/// Nodes of one executable graph, those of its child graphs included: ten times the largest that inference servers capture, and few enough
/// that a worker resolves them in well under a second.
pub const GRAPH_NODES: u32 = 1 << 18;
/// Bytes of the plan of one executable graph: the nodes of the largest with 256 bytes for each.
pub const GRAPH_BYTES: u64 = 64 << 20;
/// Child graphs inside one another; a body of a conditional node counts twice. A worker follows them by recursion; libraries nest two.
pub const GRAPH_DEPTH: u32 = 16;
/// Graphs of one session that have handles for conditional nodes: the driver keeps some KiB of the worker's memory for each.
pub const CONDITIONAL_GRAPHS: u32 = 1 << 12;
/// Handles for conditional nodes of one session. The driver keeps a value on the device for each.
pub const CONDITIONAL_HANDLES: usize = 1 << 14;
/// Bodies of one conditional node: each is a graph of the driver.
pub const CONDITIONAL_BODIES: u32 = 1 << 12;
/// Bodies of all conditional nodes of one session: the nodes stay in the driver as long as the graphs of their handles, without the nodes
/// of their bodies.
pub const SESSION_CONDITIONAL_BODIES: usize = 1 << 16;
/// Values that one node writes: the most that a driver accepts in one batch.
pub const GRAPH_WRITES: usize = 256;
/// Nodes of all executable graphs of one session. The driver keeps about a KiB of the worker's memory for each.
pub const SESSION_GRAPH_NODES: u32 = 1 << 20;
/// Bytes of the plans of all executable graphs of one session, of which the worker keeps copies.
pub const SESSION_GRAPH_BYTES: u64 = 256 << 20;
/// Arrays of one session, levels of mipmapped arrays included. The driver keeps about a KiB of the worker's memory for each.
pub const ARRAYS: u32 = 1 << 16;
/// Mipmapped arrays of one session.
pub const MIPMAPPED_ARRAYS: u32 = 1 << 14;
/// Names of levels that a session may request of one mipmapped array; they end with it. It has at most 29 levels, and a guest
/// requests a name of each once, or once per thread if several do so at the same time.
pub const LEVEL_NAMES: u32 = 256;
/// Elements of an array in one direction; the largest of any device is a linear texture with 2^28.
pub const ARRAY_EXTENT: u64 = 1 << 28;
/// Texture objects of one session. Devices have 2^20 descriptors.
pub const TEXTURE_OBJECTS: usize = 1 << 20;
/// Surface objects of one session.
pub const SURFACE_OBJECTS: usize = 1 << 20;
/// Texture references of one session, and surface references; a module of an old compiler has some dozens.
pub const IMAGE_REFERENCES: u32 = 1 << 14;
/// Contexts of one session.
pub const CONTEXTS: u32 = 64;
/// Green contexts of one session: more than a GPU has groups of multiprocessors that are worth one.
pub const GREEN_CONTEXTS: u32 = 128;
/// Groups of multiprocessors of one split. The largest GPUs have less than twice as many multiprocessors, and the least group has 2.
pub const SM_GROUPS: usize = 96;
/// Splits in a row that lead to a group of multiprocessors; each is made again for every use of the group.
pub const SM_SPLITS: usize = 32;
/// Bytes of a description of resources: one split into [`SM_GROUPS`] groups of different sizes, and others before it.
pub const DESCRIPTION_BYTES: usize = 8 << 10;
/// Different descriptors of resources that a session makes. A driver keeps each until its process ends.
pub const RESOURCE_DESCRIPTORS: usize = 1024;
/// Modules and libraries of one session.
pub const MODULES: u32 = 1 << 14;
/// Functions and kernels of one session.
pub const FUNCTIONS: u32 = 1 << 18;
/// Operations that a driver takes for one stream before it makes the caller wait: an H100's took 1,021.
pub const DRIVER_QUEUE: u64 = 1_000;
/// Pieces of work posted to one stream and not yet complete. A piece is an operation of the driver (the recording of a whole context: two),
/// and its marker another: together they fit [`DRIVER_QUEUE`], so that no stream makes the worker wait.
pub const STREAM_CREDITS: u64 = 480;
/// Host functions of one session that were posted and have not returned. The guest keeps one place free, because the worker counts
/// a function as returned only after the guest does.
pub const HOST_FUNCTIONS: u32 = 1 << 16;
/// Resources (guest memory objects) of one session: the control resource and its arenas.
pub const ATTACHMENTS: u32 = 256;
/// Of these, the resources of memory that the program registered, each up to [`RESOURCE_BYTES`]. The others are for the arena.
pub const REGISTERED_RESOURCES: usize = 128;
/// Sessions of one device, that is guest processes of one VM.
pub const SESSIONS: usize = 512;
/// Resources of one device, those of processes that never open a session included.
pub const RESOURCES: usize = 8192;
/// Contexts of the virtio-gpu device: open render nodes of the guest.
pub const GPU_CONTEXTS: usize = 2048;
/// Bytes of one resource; larger arenas are stitched from several.
pub const RESOURCE_BYTES: u64 = 1 << 30;
/// Page runs of one resource: 4 KiB pages of the largest resource, none adjacent.
pub const RESOURCE_RUNS: usize = (RESOURCE_BYTES >> 12) as usize;
/// Bytes of guest memory that one session may have mapped.
pub const SESSION_BYTES: u64 = 64 << 30;
/// Bytes of the only arena of a session whose VM has fixed arenas, unless its size is given.
pub const FIXED_ARENA_BYTES: u64 = 64 << 20;
/// Fewest and most bytes of a fixed arena: staging memory needs some, and it is one resource.
pub const FIXED_ARENAS: core::ops::RangeInclusive<u64> = 16 << 20..=RESOURCE_BYTES;
/// Unit of the bytes of a fixed arena: a huge page.
pub const FIXED_ARENA_UNIT: u64 = 2 << 20;

/// True if a fixed arena may have this many bytes.
#[must_use]
pub const fn is_fixed_arena(bytes: u64) -> bool {
    *FIXED_ARENAS.start() <= bytes && bytes <= *FIXED_ARENAS.end() && bytes.is_multiple_of(FIXED_ARENA_UNIT)
}

/// Parts of memory files that are guest memory. A worker receives at most this many for each file of a resource.
pub const EXTENTS: usize = 512;
/// Runs that the worker of one session maps one by one, unless configured. Linux allows a process 65,530 mappings, of which
/// windows and the driver need some.
pub const MAPPED_RUNS: u32 = 24 << 10;
/// Windows through which a worker reaches the pages of one resource that it does not map one by one.
pub const WINDOWS_PER_RESOURCE: usize = 128;
/// Bytes of worker memory in which one session's copies from and to such resources are kept.
pub const BOUNCE_BYTES: u64 = 1 << 30;
/// Bytes of one virtio-gpu command: the entry list of the largest resource and its header.
pub const GPU_COMMAND_BYTES: usize = RESOURCE_RUNS * 16 + 64;
/// Commands answered late (waiters) that one session may hold.
pub const WAITERS_PER_SESSION: usize = 4;
/// Commands answered late that all sessions of a device may hold; the smallest known control queue has 256 slots.
pub const WAITERS_PER_DEVICE: usize = 128;
/// Milliseconds after which a waiter is answered even though nothing happened.
pub const WAITER_MILLISECONDS: u64 = 1000;
/// Bytes of one device allocation.
pub const ALLOCATION_BYTES: u64 = 1 << 48;
/// Bytes of one image (fatbin, cubin, PTX) as shipped.
pub const IMAGE_BYTES: u64 = 1 << 30;
/// Bytes of a symbol name.
pub const NAME_BYTES: usize = 32 << 10;
/// Bytes of kernel parameters.
pub const PARAMETER_BYTES: usize = 32_764;
/// Parameters of one kernel that an answer can describe.
pub const PARAMETERS: usize = 448;
/// Launch attributes of one launch.
pub const LAUNCH_ATTRIBUTES: usize = 32;
/// Devices one session may see.
pub const DEVICES: u32 = 16;
/// Units of a host: its devices, and as many instances of them.
pub const UNITS: u32 = DEVICES * 9;
/// Device attributes that exist (CU_DEVICE_ATTRIBUTE_MAX of the newest header), with room.
pub const DEVICE_ATTRIBUTES: usize = 192;
/// Bytes of the first address window for device memory, and the fewest of each later one.
pub const SESSION_WINDOW_BYTES: u64 = 512 << 30;
/// Bytes of one later address window, in which a program reserves addresses. The largest reservation of a framework is nine eighths of a
/// device's memory, for each of its streams.
pub const WIDE_WINDOW_BYTES: u64 = 4 << 40;
/// Address windows of one session.
pub const WINDOWS: usize = 16;
/// The addresses in which session windows may lie: below the mmap randomisation band, clear of the sanitizers' shadows.
pub const WINDOW_BOUNDS: core::ops::Range<u64> = 0x7e00_0000_0000..0x7f00_0000_0000;
/// The addresses in which later windows for device memory may lie: ten times as many, which are addresses only, and clear of the
/// address sanitizer's shadow. A sanitizer that uses some of them has mapped them at its start.
pub const WIDE_WINDOW_BOUNDS: core::ops::Range<u64> = 0x7400_0000_0000..WINDOW_BOUNDS.start;
/// Bytes of each of the two logs of a compilation that are returned to a guest, with the NUL at the end.
pub const JIT_LOG_BYTES: u64 = 64 << 10;
/// Bytes of the whole report of a compilation.
pub const JIT_REPORT_BYTES: u64 = crate::jit::report_bytes(JIT_LOG_BYTES, JIT_LOG_BYTES);
/// Options of one compilation; the newest header has 36.
pub const JIT_OPTIONS: usize = 64;
/// Links of one session: the driver keeps a compiler's state for each.
pub const LINKS: u32 = 64;
/// Inputs of one link. Programs link the objects of a library one by one.
pub const LINK_INPUTS: u32 = 4096;
/// Bytes of one input of a link.
pub const LINK_INPUT_BYTES: u64 = 256 << 20;
/// Bytes of the inputs, logs and results of all links of a session. The worker's driver keeps them in host memory.
pub const LINK_BYTES: u64 = 1 << 30;
/// Bytes of kernel output that a worker keeps for its guest: the default of a driver.
pub const CONSOLE_BYTES: usize = 1 << 20;
/// The unit of quotas, of chunks and of addresses, in bytes.
pub const UNIT: u64 = 2 << 20;
/// Freed large allocations of each device, and idle pool chunks, that a session keeps for its next allocations.
pub const KEPT: usize = 64;
/// Milliseconds for which a session keeps freed memory at most, except for one idle pool chunk of each kind.
pub const KEPT_MILLISECONDS: u64 = 1_000;
/// Leases one worker may hold: a full H200 in the smallest chunks.
pub const LEASES: usize = 1 << 17;
/// Chunks in one share: an allocation that another process of the VM may open.
pub const SHARE_CHUNKS: usize = 4096;
/// Memory pools of one session; number 0 stands for allocations without a pool.
pub const POOLS: u32 = 1024;
/// Address ranges that one session may have reserved for its own mappings.
pub const RESERVATIONS: usize = 1 << 14;
/// Shares of one VM.
pub const SHARES: usize = 4096;
/// Leases in all shares of one VM.
pub const SHARED_LEASES: usize = LEASES;
/// Leases of one chunk: each session of a VM may open what another one shares, twice.
pub const CHUNK_LEASES: u32 = 1024;
const _: () = assert!(CHUNK_LEASES as usize == 2 * SESSIONS);
/// Leases of all workers of one VM: all memory of the largest device, twice.
pub const VM_LEASES: usize = 2 * LEASES;
/// Requests of one worker that its arbiter takes on before it answers; more wait in the socket.
pub const CUSTODY_REQUESTS: usize = 64;
/// Grants to grow that one worker may request and hold at once: each of its three threads that grow has two at most.
pub const GROWTHS: usize = 8;
/// Processes that may ask the inventory at once: `sluiced` and the arbiters.
pub const INVENTORY_CLIENTS: usize = 256;
/// Milliseconds for which a grant to grow may hold up other VMs; then it is charged in full and holds up none.
pub const GROW_MILLISECONDS: u64 = 2_000;
/// Milliseconds for which a worker's death may hold up growth of other VMs, and the most that a VM's deaths have in credit.
pub const DEATH_MILLISECONDS: u64 = 2_000;
/// Milliseconds for which a worker waits for a chunk that may come: to be scrubbed, given back by others, granted by
/// `sluiced`. Then it is refused.
pub const TAKE_MILLISECONDS: u64 = 3_000;
/// Milliseconds for which requests wait for memory that left custody and that no known process has: a driver may give the memory
/// of an ended process back late.
pub const LATE_MEMORY_MILLISECONDS: u64 = 5_000;
/// Milliseconds for which a worker waits for a grant to grow. Then it is refused. Longer than a VM pays for its deaths.
pub const GROW_WAIT_MILLISECONDS: u64 = 20_000;
/// Milliseconds for which growth waits for memory that is not released yet: a dying worker still has its memory, and the worker
/// that grows next may have been started because of that death.
pub const GROW_TIMEOUT_MILLISECONDS: u64 = 1_000;
/// Milliseconds after which a driver that still lists a dead worker is reported.
pub const STUCK_MILLISECONDS: u64 = 10_000;
/// The largest weight of a VM's share of a unit's time.
pub const WEIGHT: u32 = 10_000;
/// Milliseconds for which a worker may leave its arbiter's answers unread; then it is ended.
pub const CUSTODY_UNREAD_MILLISECONDS: u64 = 5_000;
/// Calls, launches or copies of a worker that are accepted per millisecond of its life; more than any host can submit.
pub const REPORTED_PER_MILLISECOND: u64 = 10_000;
/// Bytes copied by a worker that are accepted per millisecond of its life: 16 TB/s.
pub const REPORTED_BYTES_PER_MILLISECOND: u64 = 1 << 34;
/// Pieces of work that a worker may have submitted after its permit was closed: each of its threads may have read the permit before,
/// with one piece.
pub const WITHOUT_PERMIT: u64 = 64;
/// The vsock port on which a guest whose memory is not shared finds the host: "sl" in ASCII.
pub const STREAM_PORT: u32 = 0x736c;
/// Bytes that one side of a stream may send before the other has read any of them. The defaults, 64 and 256 KiB, make large copies wait
/// for each other.
pub const STREAM_AHEAD_BYTES: u64 = 1 << 20;
/// Bytes of arena memory in one frame of a stream.
pub const STREAM_BULK_BYTES: usize = 256 << 10;
/// Streams of one device at once; each is a guest process.
pub const STREAMS_PER_DEVICE: usize = 128;
/// Bytes of host memory that stand for guest memory behind all streams of one device, and behind any one of them.
pub const STREAM_BYTES: u64 = 4 << 30;
/// Calls of one stream that have not yet written their arena memory. The host keeps an entry of each to send the results.
pub const STREAM_RESULTS: usize = 1 << 14;
/// Milliseconds within which a new stream opens its session.
pub const STREAM_OPEN_MILLISECONDS: u64 = 10_000;
/// Connections of programs to one device at once.
pub const DIRECT_CONNECTIONS: usize = 256;
/// Connections of one user's programs to one device; NVIDIA's own service for programs that share a device has 60 places.
pub const USER_CONNECTIONS: u64 = 64;
/// Connections of one user that wait until others of the same user are closed.
pub const USER_ARRIVALS: u64 = 16;
/// Sessions of one user's programs on one device.
pub const USER_SESSIONS: u64 = 64;
/// virtio-gpu contexts of one user's programs on one device.
pub const USER_GPU_CONTEXTS: u64 = GPU_CONTEXTS as u64;
/// Resources of one user's programs on one device.
pub const USER_RESOURCES: u64 = RESOURCES as u64;
/// Page runs of all resources of one user's programs on one device; eight bytes are kept for each.
pub const USER_RUNS: u64 = 1 << 20;
/// Pages of all resources of one user's programs on one device: 4 TiB of them, which may be addresses only. A bit is kept for each.
pub const USER_PAGES: u64 = 1 << 30;
/// Commands of one user's programs that one device answers late.
pub const USER_WITHHELD: u64 = WAITERS_PER_DEVICE as u64;
