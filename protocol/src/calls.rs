//! The call table: the requests of a guest, declared once. In one file: it is one table.
//!
//! Two tables, because many C functions share one meaning. [`crate::for_each_wire_call`] lists the calls that cross to the
//! host; encoder, decoder, the requests of the guest, the worker's jobs, fuzz seeds and documentation come from the row.
//! [`crate::for_each_c_call`] lists the C functions that are served, with the signature of `cuda.h`; the shim's exports, its
//! `cuGetProcAddress` and the worker's table of driver entry points come from the row. A symbol of the driver that is not
//! listed, or listed as `driver`, is exported by the shim as a function that returns `CUDA_ERROR_NOT_SUPPORTED`.
//!
//! A row of the wire table is `id class name(parameters) -> (results)`. Parameters are of *kinds*, types of [`crate::field`],
//! which define the encoding, the checks of the decoder, the arena memory that travels along, and the object of the worker.
//!
//! - Classes: a `post` has no answer (a reply slot in the header may request one; then the answer is the status of its
//!   submission); work of a post that names a stream is complete when the stream's sequence in the session page has reached
//!   it. A `work` is a post for whose end the guest waits at once if its environment asks that launches block. A `sync` call is
//!   answered. A `wait` call is answered, too, after everything that was posted before it is submitted.
//! - Sections name the thread of the worker that serves a row: the dispatcher (`inline`), the submitter in the order of a
//!   stream (`stream`; `launch` if the work has parameters or may need local memory), the memory helper (`memory`; `quick` if the
//!   dispatcher first tries to answer at once, without the helper and ahead of posted work that it does not depend on), and the
//!   module helper (`module`; `image` for arrays, textures and surfaces).
//!
//! Classes of C functions: `local` is answered in the guest, `hand` uses wire calls, `forward` makes the one wire call that
//! follows its signature (`=> call(parameter: argument) -> (result: place)`), in the current context, and has no code of its own;
//! `contextless` does so without a context; `driver` is for the worker alone. If a forwarded call makes or ends an object, its
//! `Mint` or `Take` is the last parameter: no other can then be refused once the object is on its way. `scalar` is `hand` for a
//! signature of handles, numbers, and places of one number each: the worker's method of the driver follows from it, as it does for
//! `forward` and `contextless`. No number is an address.
//!
//! Ids are stable and never reused; [`RETIRED`] lists those of rows that are gone.

#[allow(clippy::wildcard_imports, reason = "the kinds of objects, in one list")]
use crate::handle::*;
use crate::{
    field::{
        AccessFlags, ArenaIn, ArenaOut, ArenaRowsIn, ArenaRowsOut, ArenaText, CarriedOptions, DeviceAddress,
        ElementSize, Field, FieldError, LaunchAttributes, Mint, Name, Ordinal, ParameterBytes, Reader, Size,
        Take, Writer,
    },
    image::{ImageResource, ImageView, Sampling},
    limits,
    record::Header,
    resources::{ResourceBytes, SmResults},
    staged::Staged,
};

/// Version of the records; a worker refuses a shim of another version.
pub const VERSION: u32 = 6;

/// Ids of wire calls of earlier versions.
pub const RETIRED: &[u16] = &[0x0100, 0x0102, 0x0113, 0x0500, 0x0501];

/// Calls `$callback!` with every row of the wire table, in the sections of the threads that serve them.
#[macro_export]
macro_rules! for_each_wire_call {
    ($callback:ident) => {
        $callback! {
            inline {
                /// First call of a session. A `version` other than `VERSION` is refused. The driver takes `room` pieces of work of a
                /// stream at a time. More recordings of whole contexts under way would delay all streams.
                0x0001 sync session_hello(version: u32, process: u32) -> (driver_version: u32, devices: u32, room: u32);
                /// The facts that the guest keeps about a device.
                0x0002 sync device_info(device: Ordinal) -> (name: [u8; 128], uuid: [u8; 16], memory: u64,
                    least_priority: i32, greatest_priority: i32, attributes: Attributes, host_atomics: [u32; 13]);
                /// Takes the oldest text that kernels have printed, `length` bytes of it. If `error` is true, the driver wrote
                /// it to standard error, as it does for an assertion that failed. Answered also after a sticky error.
                0x0004 sync console_read() -> (error: bool, length: u32, text: [u8; 1024]);

                /// True if a device can access the memory of a peer, and the relative performance of their link.
                0x0007 sync device_peer(device: Ordinal, peer: Ordinal) -> (reaches: bool, rank: i32);

                /// Creates a context, or retains the primary one. `stream` is the stream slot of its legacy default stream.
                0x0010 sync context_create(context: Mint<Context>, device: Ordinal, flags: u32, primary: bool, stream: u32) -> ();
                /// Destroys a context, or resets the primary one, with everything in it. The guest has waited for its work.
                0x0011 sync context_destroy(context: Id<Context>) -> ();

                /// The multiprocessors at the end of a path (see `resources`): those of its origin, or the results of its last split.
                0x0440 sync sm_resources<'a>(path: ResourceBytes<'a>) -> (results: SmResults);
                /// The number of workloads at a time for which a device has work queues.
                0x0442 sync workqueue_limit(device: Ordinal) -> (limit: u32);

                /// Encodes the descriptor (`CUtensorMap`) of a tiled tensor of `rank` dimensions, without a look at its memory. The
                /// arrays have `rank` elements that count, `strides` one fewer.
                0x0020 sync tensor_map_tiled(format: u32, rank: u32, address: u64, dimensions: [u64; 5], strides: [u64; 5],
                    tile: [u32; 5], steps: [u32; 5], interleave: u32, swizzle: u32, promotion: u32, fill: u32)
                    -> (descriptor: [u8; 128]);
                /// Encodes the descriptor of a tensor whose boxes are columns of an image: the box of pixels between two corners, of
                /// which `rank - 2` coordinates count, each signed.
                0x0021 sync tensor_map_im2col(format: u32, rank: u32, address: u64, dimensions: [u64; 5], strides: [u64; 5],
                    lower: [u32; 3], upper: [u32; 3], channels: u32, pixels: u32, steps: [u32; 5], interleave: u32, swizzle: u32,
                    promotion: u32, fill: u32) -> (descriptor: [u8; 128]);
                /// The same for boxes that are wide: of the corners, only the coordinates in the rows of the image, each signed.
                0x0022 sync tensor_map_im2col_wide(format: u32, rank: u32, address: u64, dimensions: [u64; 5], strides: [u64; 5],
                    lower: u32, upper: u32, channels: u32, pixels: u32, steps: [u32; 5], interleave: u32, mode: u32, swizzle: u32,
                    promotion: u32, fill: u32) -> (descriptor: [u8; 128]);
                /// Replaces the tensor's address in a descriptor.
                0x0023 sync tensor_map_replace(descriptor: [u8; 128], address: u64) -> (replaced: [u8; 128]);
                /// Changes the allocation class (`CUtensorMapAllocClass`) of a descriptor, and answers the class that it has then.
                0x0433 sync tensor_map_set_class(descriptor: [u8; 128], class: u32) -> (changed: [u8; 128], effective: u32);

                /// Frees an allocation when the header's stream has completed its earlier work.
                0x0104 post memory_free_ordered(address: DeviceAddress) -> ();

                /// Asks for the end of everything that was posted before to the stream in a slot. The call is no work: it has no sequence.
                0x0301 post mark(slot: u32) -> ();

                /// Creates a stream of the current context in stream slot `slot`, whose sequence continues.
                0x0400 post stream_create(stream: Mint<Stream>, slot: u32, flags: u32, priority: i32) -> ();
                /// Creates a stream of a green context of the current context. It never waits for the legacy stream.
                0x0441 post green_stream_create(stream: Mint<Stream>, green: Id<GreenContext>, slot: u32, priority: i32) -> ();
                /// Destroys a stream; work on it still completes.
                0x0401 post stream_destroy(stream: Id<Stream>) -> ();
                /// Sets an attribute (`CUstreamAttrID`) of the stream in a slot.
                0x0403 sync stream_set_attribute(slot: u32, attribute: u32, value: [u64; 8]) -> ();
                /// Creates an event of the current context.
                0x0410 post event_create(event: Mint<Event>, flags: u32) -> ();
                /// Destroys an event.
                0x0411 post event_destroy(event: Id<Event>) -> ();
                /// Milliseconds between two recorded events.
                0x0413 sync event_elapsed(start: Id<Event>, end: Id<Event>) -> (milliseconds: f32);

                /// Makes an executable graph of a plan (see `graph`). `flags` are `CUgraphInstantiate_flags`. If the driver refuses,
                /// `error` is its code, and `node` the number of the node that is the reason, or `NO_NODE`.
                0x0502 sync graph_instantiate(flags: u32, plan: ArenaIn<{ limits::GRAPH_BYTES }>, graph: Mint<GraphExecutable>)
                    -> (error: u32, node: u32);
                /// Replaces the work of one node by that of a change (see `graph`).
                0x0503 wait graph_set_work(graph: Id<GraphExecutable>, change: ArenaIn<{ limits::GRAPH_BYTES }>) -> ();
                /// Replaces the work of all nodes by that of a plan with the same nodes. Answered as `graph_instantiate`.
                0x0504 wait graph_update(graph: Id<GraphExecutable>, plan: ArenaIn<{ limits::GRAPH_BYTES }>) -> (error: u32, node: u32);
                /// Destroys an executable graph; work of it still completes.
                0x0506 post graph_destroy(graph: Id<GraphExecutable>) -> ();
            }

            launch {
                /// Launches a kernel. The guest has checked everything that the driver would refuse at once. Its end is published soon
                /// after `mark` asks for it, and otherwise some time later. The end of all other work is published without a request.
                0x0300 work launch<'a>(function: Id<Function>, grid: [u32; 3], block: [u32; 3], shared: u32, cooperative: bool,
                    attributes: LaunchAttributes<'a>, parameters: ParameterBytes<'a>) -> ();
                /// Launches an executable graph in the header's stream. All of it is one piece of work.
                0x0505 post graph_launch(graph: Id<GraphExecutable>) -> ();
            }

            stream {
                /// Copies arena memory to device memory.
                0x0110 work memcpy_htod(to: DeviceAddress, from: ArenaIn<{ u64::MAX }>) -> ();
                /// Copies device memory to arena memory.
                0x0111 work memcpy_dtoh(to: ArenaOut<{ u64::MAX }>, from: DeviceAddress) -> ();
                /// Copies device memory.
                0x0112 work memcpy_dtod(to: DeviceAddress, from: DeviceAddress, bytes: u64) -> ();
                /// Copies rows of arena memory to device memory.
                0x0115 work memcpy_2d_htod(to: DeviceAddress, to_pitch: u64, from: ArenaRowsIn) -> ();
                /// Copies rows of device memory to arena memory.
                0x0116 work memcpy_2d_dtoh(to: ArenaRowsOut, from: DeviceAddress, from_pitch: u64) -> ();
                /// Copies `height` rows of `width` bytes of device memory.
                0x0117 work memcpy_2d_dtod(to: DeviceAddress, to_pitch: u64, from: DeviceAddress, from_pitch: u64, width: u64,
                    height: u64) -> ();
                /// Fills `height` rows of `width` elements with `value`.
                0x0114 work memset(to: DeviceAddress, pitch: u64, element: ElementSize, value: u32, width: u64, height: u64) -> ();

                /// Writes a value of 4 bytes, or of 8 if `wide`, to memory of the device or memory that it reaches in place. The address is
                /// aligned to the value's size.
                0x0118 post stream_write_value(to: DeviceAddress, value: u64, wide: bool) -> ();
                /// Holds the header's stream until a comparison (`CUstreamWaitValue_flags`, without a flush) of a value in such memory
                /// with `value` is true.
                0x0430 post stream_wait_value(at: DeviceAddress, value: u64, wide: bool, comparison: u32) -> ();
                /// A memory barrier of a type (`CUstreamMemoryBarrier_flags`).
                0x0431 post stream_barrier(kind: u32) -> ();

                /// The header's stream waits for the event's latest recording.
                0x0402 post stream_wait(event: Id<Event>) -> ();
                /// Records an event in the header's stream.
                0x0412 post event_record(event: Id<Event>) -> ();

                /// Records an event behind all work of the header's context, and makes the header's stream wait for it.
                0x0432 post context_record(event: Id<Event>) -> ();

                /// Holds the header's stream while the guest runs the function that it names `token`.
                0x0420 post host_call(token: u32) -> ();

                /// Copies rows of arena memory to rows of one slice of an array. `at` is the first byte of a row, the first row, and the
                /// slice or layer.
                0x0608 work memcpy_htoa(to: Id<Array>, at: [u32; 3], from: ArenaRowsIn) -> ();
                /// Copies rows of one slice of an array to rows of arena memory.
                0x0609 work memcpy_atoh(to: ArenaRowsOut, from: Id<Array>, at: [u32; 3]) -> ();
                /// Copies a box of device memory to an array: `extent` is the bytes of a row, the rows of a slice, and the slices.
                /// `from_rows` are the rows from the start of a slice to that of the next.
                0x060a work memcpy_dtoa(to: Id<Array>, at: [u32; 3], from: DeviceAddress, from_pitch: u64, from_rows: u64,
                    extent: [u64; 3]) -> ();
                /// Copies a box of an array to device memory.
                0x060b work memcpy_atod(to: DeviceAddress, to_pitch: u64, to_rows: u64, from: Id<Array>, at: [u32; 3],
                    extent: [u64; 3]) -> ();
                /// Copies a box of an array to an array.
                0x060c work memcpy_atoa(to: Id<Array>, to_at: [u32; 3], from: Id<Array>, from_at: [u32; 3], extent: [u64; 3]) -> ();
            }

            quick {
                /// Free and total bytes of a device as the VM may see them; needs no context.
                0x0006 wait device_memory(device: Ordinal) -> (free: u64, total: u64);
                /// Allocates device memory in a window, from a pool. The guest chooses the number of a pool, below the limit of pools;
                /// 0 is no pool. The answer's address is the same in guest, worker and GPU.
                0x0103 sync memory_allocate(pool: u32, bytes: Size<{ limits::ALLOCATION_BYTES }>) -> (address: u64);
                /// Frees an allocation, or memory of `ipc_open`. The guest has waited for every user.
                0x0101 post memory_free(address: DeviceAddress) -> ();
                /// Unmaps whole mappings. The guest has waited for every user.
                0x0124 wait va_range_unmap(address: u64, bytes: u64) -> ();
            }

            memory {
                /// Reserves an address window for device memory, at exactly `base` or not at all. The guest has reserved it on its
                /// side before.
                0x0003 sync window_reserve(base: u64, bytes: Size<{ limits::WIDE_WINDOW_BYTES }>) -> ();
                /// The `index`-th process of the VM that uses a device: the process id in its guest, and its bytes of device memory.
                /// `found` is false past the last one.
                0x0005 sync process_info(device: Ordinal, index: u32) -> (found: bool, process: u32, bytes: u64);
                /// Reads a limit (`CUlimit`) of the current context.
                0x0012 sync context_limit(limit: u32) -> (value: u64);
                /// Sets a limit of the current context and answers its new value.
                0x0013 sync context_set_limit(limit: u32, value: u64) -> (value: u64);
                /// Makes earlier writes of other devices to device memory visible to the current context's device, or to all.
                0x0014 sync flush_rdma_writes(target: u32, scope: u32) -> ();
                /// Lets the device of the current context access the memory of a peer: another context, on another device.
                0x0015 sync peer_enable(peer: Id<Context>) -> ();
                /// Ends that. The guest has waited for every user.
                0x0016 wait peer_disable(peer: Id<Context>) -> ();

                /// Sets the bytes of free memory that a pool of a device may keep.
                0x0105 post pool_threshold(pool: u32, device: Ordinal, bytes: u64) -> ();
                /// Releases free memory of a pool until the pool has no more than `keep` bytes.
                0x0106 wait pool_trim(pool: u32, keep: u64) -> ();
                /// Bytes of a pool on a device. `reset_reserved` and `reset_used` first reset the high-water marks.
                0x0107 wait pool_usage(pool: u32, device: Ordinal, reset_reserved: bool, reset_used: bool)
                    -> (reserved: u64, reserved_high: u64, used: u64, used_high: u64);
                /// Destroys a pool; memory that is allocated from it stays until it is freed.
                0x0108 post pool_end(pool: u32) -> ();

                /// Sets the access of a peer to memory of a pool of a device.
                0x010a wait pool_access(pool: u32, device: Ordinal, peer: Ordinal, access: AccessFlags) -> ();

                /// Gives free memory of graphs on a device back to the device.
                0x0109 wait graph_memory_trim(device: Ordinal) -> ();

                /// Makes physical memory of a device that the guest maps itself.
                0x0120 wait phys_alloc_create(device: Ordinal, bytes: u64) -> (allocation: u64);
                /// Releases the guest's handle of physical memory; the memory is freed when it has no mapping.
                0x0121 post phys_alloc_release(allocation: u64) -> ();
                /// Maps the first `bytes` of physical memory into a reserved range.
                0x0122 wait phys_alloc_map(allocation: u64, address: u64, bytes: u64) -> ();
                /// Sets the access of a device to whole mappings.
                0x0123 wait va_range_set_access(address: u64, bytes: u64, device: Ordinal, access: AccessFlags) -> ();
                /// Reserves addresses in the session's windows, at `hint` if they are free.
                0x0125 wait va_range_reserve(bytes: u64, alignment: u64, hint: u64) -> (address: u64);
                /// Frees a whole reservation.
                0x0126 wait va_range_free(address: u64, bytes: u64) -> ();
                /// Lets other processes of the VM import physical memory.
                0x0127 wait phys_alloc_export(allocation: u64) -> (unit: u32, share: u128);
                /// Imports physical memory of another process of the VM.
                0x0128 wait phys_alloc_import(device: Ordinal, share: u128) -> (allocation: u64, bytes: u64);
                /// Lets other processes of the VM open the allocation that begins at `address`.
                0x0130 wait ipc_export(address: DeviceAddress) -> (unit: u32, share: u128, offset: u64);
                /// Opens `bytes` from `offset` of an export of another process of the VM, of memory on `device`, also for the device of
                /// the current context; `memory_free` frees it.
                0x0131 sync ipc_open(device: Ordinal, share: u128, offset: u64, bytes: u64) -> (address: u64);
            }

            module {
                /// Loads an image that lies in an arena: a module of the current context, or a library. Numbers and logs of the
                /// compiler go to `report` (see `jit`), also when loading fails, with room for logs of `info` and `error` bytes.
                0x0200 sync module_load<'a>(module: Mint<Module>, library: bool, image: ArenaIn<{ limits::IMAGE_BYTES }>,
                    options: CarriedOptions<'a>, info: Size<{ limits::JIT_LOG_BYTES }>,
                    error: Size<{ limits::JIT_LOG_BYTES }>, report: ArenaText<{ limits::JIT_REPORT_BYTES }>) -> ();
                /// Unloads a module or library. The guest has waited for its kernels.
                0x0201 wait module_unload(module: Take<Module>) -> ();
                /// Finds a function of a module, or a kernel of a library, and everything the guest keeps about it.
                0x0202 sync module_function<'a>(module: Id<Module>, function: Mint<Function>, name: Name<'a>)
                    -> (attributes: FunctionAttributes, parameters: Parameters);
                /// Finds a variable.
                0x0203 sync module_global<'a>(module: Id<Module>, name: Name<'a>)
                    -> (address: u64, bytes: u64, managed: bool);
                /// Number of functions or kernels of a module.
                0x0204 sync module_function_count(module: Id<Module>) -> (count: u32);
                /// The name of function `index`, with its NUL, in arena memory.
                0x0205 sync module_function_name(module: Id<Module>, index: u32, into: ArenaOut<{ limits::NAME_BYTES as u64 }>)
                    -> (length: u64);
                /// Sets an attribute (`CUfunction_attribute`) of a function in the current context.
                0x0206 sync function_set_attribute(function: Id<Function>, attribute: u32, value: i32)
                    -> (attributes: FunctionAttributes);
                /// Blocks per multiprocessor.
                0x0207 sync occupancy_blocks(function: Id<Function>, block: i32, shared: u64, flags: u32) -> (blocks: i32);
                /// Block size of highest occupancy for a fixed dynamic shared size, and the grid that fills the device.
                0x0208 sync occupancy_block_size(function: Id<Function>, shared: u64, limit: i32, flags: u32)
                    -> (grid: i32, block: i32);
                /// Dynamic shared memory left at this occupancy.
                0x0209 sync occupancy_shared(function: Id<Function>, blocks: i32, block: i32) -> (bytes: u64);
                /// `cuOccupancyMaxActiveClusters` (`potential` false) or `cuOccupancyMaxPotentialClusterSize` for a launch.
                0x020a sync occupancy_clusters<'a>(potential: bool, function: Id<Function>, grid: [u32; 3], block: [u32; 3],
                    shared: u32, attributes: LaunchAttributes<'a>) -> (value: i32);

                /// Begins a link in the current context, with logs of `info` and `error` bytes, to which every call about the link adds.
                0x0210 sync link_create<'a>(link: Mint<Link>, options: CarriedOptions<'a>, info: Size<{ limits::JIT_LOG_BYTES }>,
                    error: Size<{ limits::JIT_LOG_BYTES }>, report: ArenaText<{ limits::JIT_REPORT_BYTES }>) -> ();
                /// Adds an input of a kind (`CUjitInputType`), with its name in messages.
                0x0211 sync link_add<'a>(link: Id<Link>, kind: u32, input: ArenaIn<{ limits::LINK_INPUT_BYTES }>, name: Name<'a>,
                    options: CarriedOptions<'a>, report: ArenaText<{ limits::JIT_REPORT_BYTES }>) -> ();
                /// Links the inputs. The worker keeps the result, an image of `bytes` bytes.
                0x0212 sync link_complete(link: Id<Link>, report: ArenaText<{ limits::JIT_REPORT_BYTES }>) -> (bytes: u64);
                /// Copies a part of the result, from byte `offset` on.
                0x0213 sync link_image(link: Id<Link>, offset: u64, into: ArenaOut<{ limits::IMAGE_BYTES }>) -> ();
                /// Ends a link, and frees its result.
                0x0214 sync link_destroy(link: Take<Link>) -> ();

                /// Makes a descriptor of resources of a device (see `resources`), which stays, but with the queues of a context only
                /// until that context ends. The same resources give the same one.
                0x0443 sync resource_descriptor<'a>(device: Ordinal, resources: ResourceBytes<'a>) -> (descriptor: u32);
                /// Makes a green context of a primary context, of the device of the descriptor.
                0x0444 sync green_create(primary: Id<Context>, descriptor: u32, green: Mint<GreenContext>) -> ();
                /// Destroys a green context. The guest has destroyed its streams.
                0x0445 wait green_destroy(green: Take<GreenContext>) -> ();
                /// Makes a graph of the driver in which handles for conditional nodes live. Plans with such nodes name it.
                0x0507 sync conditional_graph_create(graph: Mint<ConditionalGraph>) -> ();
                /// Creates a handle of the current context. `flags` are `CU_GRAPH_COND_*`. Device code sets its value by the number
                /// that the driver gives it.
                0x0508 sync conditional_handle_create(graph: Id<ConditionalGraph>, value: u32, flags: u32) -> (handle: u64);
                /// Destroys a graph with its handles; executables of it remain.
                0x0509 post conditional_graph_destroy(graph: Take<ConditionalGraph>) -> ();
            }

            image {
                /// Makes an array, whose bytes are 0. The extent is in elements; `format` is a `CUarray_format`.
                0x0600 sync array_create(extent: [u64; 3], format: u32, channels: u32, flags: u32, array: Mint<Array>) -> ();
                /// Destroys an array. The guest has waited for its users.
                0x0601 wait array_destroy(array: Take<Array>) -> ();
                /// Makes an array with mipmap levels, whose bytes are 0.
                0x0602 sync mipmapped_array_create(extent: [u64; 3], format: u32, channels: u32, flags: u32, levels: u32,
                    array: Mint<MipmappedArray>) -> ();
                /// Names a level of a mipmapped array as an array, which ends with the whole.
                0x0603 sync mipmapped_array_level(whole: Id<MipmappedArray>, level: u32, array: Mint<Array>) -> ();
                /// Destroys a mipmapped array with its levels. The guest has waited for their users.
                0x0604 wait mipmapped_array_destroy(array: Take<MipmappedArray>) -> ();

                /// Makes a texture object: the driver's number of it, which kernels take.
                0x0610 sync texture_create(resource: ImageResource, sampling: Sampling, view: ImageView) -> (texture: u64);
                /// Destroys a texture object. The guest has waited for its users.
                0x0611 wait texture_destroy(texture: u64) -> ();
                /// Makes a surface object: the driver's number of it, which kernels take.
                0x0612 sync surface_create(array: Id<Array>) -> (surface: u64);
                /// Destroys a surface object. The guest has waited for its users.
                0x0613 wait surface_destroy(surface: u64) -> ();

                /// Finds a texture reference of a module.
                0x0620 sync texture_reference<'a>(module: Id<Module>, name: Name<'a>, reference: Mint<TextureReference>) -> ();
                /// Binds a texture reference with all of its state, for launches that follow.
                0x0621 wait texture_reference_set(reference: Id<TextureReference>, resource: ImageResource, sampling: Sampling) -> ();
                /// Finds a surface reference of a module.
                0x0622 sync surface_reference<'a>(module: Id<Module>, name: Name<'a>, reference: Mint<SurfaceReference>) -> ();
                /// Binds a surface reference, for launches that follow.
                0x0623 wait surface_reference_set(reference: Id<SurfaceReference>, array: Id<Array>) -> ();
            }
        }
    };
}

/// Calls `$callback!` with every row of the table of C functions. Handles are `Handle`s (ids of the session in the guest,
/// the driver's own in the worker), enumerations `c_uint`, structures `c_void`: C code may pass any value, and a Rust
/// enumeration or structure with one inside must never hold a value it does not have.
#[macro_export]
macro_rules! for_each_c_call {
    ($callback:ident) => {
        $callback! {

            // start-up and version
            0x1000 @2000 local fn cuInit(flags: c_uint);
            0x1001 @2020 local fn cuDriverGetVersion(driver_version: *mut c_int);
            0x1002 @11030 local fn cuGetProcAddress(symbol: *const c_char, pfn: *mut *mut c_void, cuda_version: c_int, flags: u64);
            0x1003 @12000 local fn cuGetProcAddress_v2(symbol: *const c_char, pfn: *mut *mut c_void, cuda_version: c_int, flags: u64, symbol_status: *mut c_uint);
            0x1004 @3000 local fn cuGetExportTable(pp_export_table: *mut *const c_void, p_export_table_id: *const c_void);
            0x1005 @6000 local fn cuGetErrorName(error: c_uint, p_str: *mut *const c_char);
            0x1006 @6000 local fn cuGetErrorString(error: c_uint, p_str: *mut *const c_char);
            0x1007 @12090 local fn cuLogsRegisterCallback(callback_func: Option<Callback>, user_data: *mut c_void, callback_out: *mut Handle);
            0x1008 @12090 local fn cuLogsUnregisterCallback(callback: Handle);
            0x1009 @12090 local fn cuLogsCurrent(iterator_out: *mut c_void, flags: c_uint);
            0x100a @12090 local fn cuLogsDumpToFile(iterator: *mut c_void, path_to_file: *const c_char, flags: c_uint);
            0x100b @12090 local fn cuLogsDumpToMemory(iterator: *mut c_void, buffer: *mut c_char, size: *mut usize, flags: c_uint);
            0x100c @4000 local fn cuProfilerStart();
            0x100d @4000 local fn cuProfilerStop();

            // devices
            0x1020 @2000 local fn cuDeviceGet(device: *mut c_int, ordinal: c_int);
            0x1021 @2000 local fn cuDeviceGetCount(count: *mut c_int);
            0x1022 @2000 local fn cuDeviceGetName(name: *mut c_char, len: c_int, dev: c_int);
            0x1023 @9020 local fn cuDeviceGetUuid(uuid: *mut c_void, dev: c_int);
            0x1024 @11040 local fn cuDeviceGetUuid_v2(uuid: *mut c_void, dev: c_int);
            0x1025 @3020 local fn cuDeviceTotalMem_v2(bytes: *mut usize, dev: c_int);
            0x1026 @2000 local fn cuDeviceGetAttribute(pi: *mut c_int, attrib: c_uint, dev: c_int);
            0x1027 @2000 local fn cuDeviceGetProperties(prop: *mut c_void, dev: c_int);
            0x1028 @2000 local fn cuDeviceComputeCapability(major: *mut c_int, minor: *mut c_int, dev: c_int);
            0x1029 @4010 local fn cuDeviceGetPCIBusId(pci_bus_id: *mut c_char, len: c_int, dev: c_int);
            0x102a @4010 local fn cuDeviceGetByPCIBusId(dev: *mut c_int, pci_bus_id: *const c_char);
            0x102b @4000 hand fn cuDeviceCanAccessPeer(can_access_peer: *mut c_int, dev: c_int, peer_dev: c_int);
            0x102c @8000 hand fn cuDeviceGetP2PAttribute(value: *mut c_int, attrib: c_uint, src_device: c_int, dst_device: c_int);
            0x102d @11040 local fn cuDeviceGetExecAffinitySupport(pi: *mut c_int, kind: c_uint, dev: c_int);
            0x102e @11010 local fn cuDeviceGetTexture1DLinearMaxWidth(max_width_in_elements: *mut usize, format: c_uint, num_channels: c_uint, dev: c_int);

            0x102f @13000 local fn cuDeviceGetHostAtomicCapabilities(capabilities: *mut c_uint, operations: *const c_uint, count: c_uint, dev: c_int);
            0x1030 @13000 local fn cuDeviceGetP2PAtomicCapabilities(capabilities: *mut c_uint, operations: *const c_uint, count: c_uint, src_device: c_int, dst_device: c_int);
            0x1031 @10000 local fn cuDeviceGetLuid(luid: *mut c_char, device_node_mask: *mut c_uint, dev: c_int);
            0x1032 @11040 local fn cuDeviceGetGraphMemAttribute(device: c_int, attr: c_uint, value: *mut u64);
            0x1033 @11040 local fn cuDeviceSetGraphMemAttribute(device: c_int, attr: c_uint, value: *const u64);

            // contexts
            0x1040 @7000 hand fn cuDevicePrimaryCtxRetain(pctx: *mut Handle, dev: c_int);
            0x1041 @7000 hand fn cuDevicePrimaryCtxRelease(dev: c_int);
            0x1042 @11000 scalar fn cuDevicePrimaryCtxRelease_v2(dev: c_int);
            0x1043 @7000 hand fn cuDevicePrimaryCtxReset(dev: c_int);
            0x1044 @11000 hand fn cuDevicePrimaryCtxReset_v2(dev: c_int);
            0x1045 @7000 hand fn cuDevicePrimaryCtxSetFlags(dev: c_int, flags: c_uint);
            0x1046 @11000 hand fn cuDevicePrimaryCtxSetFlags_v2(dev: c_int, flags: c_uint);
            0x1047 @7000 hand fn cuDevicePrimaryCtxGetState(dev: c_int, flags: *mut c_uint, active: *mut c_int);
            0x1048 @3020 hand fn cuCtxCreate_v2(pctx: *mut Handle, flags: c_uint, dev: c_int);
            0x1049 @11040 hand fn cuCtxCreate_v3(pctx: *mut Handle, params_array: *mut c_void, num_params: c_int, flags: c_uint, dev: c_int);
            0x104a @12050 hand fn cuCtxCreate_v4(pctx: *mut Handle, ctx_create_params: *mut c_void, flags: c_uint, dev: c_int);
            0x104b @4000 scalar fn cuCtxDestroy_v2(ctx: Handle);
            0x104c @2000 hand fn cuCtxDestroy(ctx: Handle);
            0x104d @2000 hand fn cuCtxAttach(pctx: *mut Handle, flags: c_uint);
            0x104e @2000 hand fn cuCtxDetach(ctx: Handle);
            0x104f @4000 local fn cuCtxPushCurrent_v2(ctx: Handle);
            0x1050 @2000 local fn cuCtxPushCurrent(ctx: Handle);
            0x1051 @4000 local fn cuCtxPopCurrent_v2(pctx: *mut Handle);
            0x1052 @2000 local fn cuCtxPopCurrent(pctx: *mut Handle);
            0x1053 @4000 local fn cuCtxSetCurrent(ctx: Handle);
            0x1054 @4000 local fn cuCtxGetCurrent(pctx: *mut Handle);
            0x1055 @2000 local fn cuCtxGetDevice(device: *mut c_int);
            0x1056 @13000 local fn cuCtxGetDevice_v2(device: *mut c_int, ctx: Handle);
            0x1057 @7000 local fn cuCtxGetFlags(flags: *mut c_uint);
            0x1058 @12010 local fn cuCtxSetFlags(flags: c_uint);
            0x1059 @12000 local fn cuCtxGetId(ctx: Handle, ctx_id: *mut u64);
            0x105a @3020 local fn cuCtxGetApiVersion(ctx: Handle, version: *mut c_uint);
            0x105b @2000 scalar fn cuCtxSynchronize();
            0x105c @13000 hand fn cuCtxSynchronize_v2(ctx: Handle);
            0x105d @3010 forward fn cuCtxGetLimit(pvalue: *mut usize, limit: c_uint)
                => context_limit(limit: limit) -> (value: pvalue);
            0x105e @3010 forward fn cuCtxSetLimit(limit: c_uint, value: usize)
                => context_set_limit(limit: limit, value: value) -> ();
            0x105f @5050 scalar fn cuCtxGetStreamPriorityRange(least_priority: *mut c_int, greatest_priority: *mut c_int);
            0x1060 @3020 local fn cuCtxGetCacheConfig(pconfig: *mut c_uint);
            0x1061 @3020 local fn cuCtxSetCacheConfig(config: c_uint);
            0x1062 @4020 local fn cuCtxGetSharedMemConfig(p_config: *mut c_uint);
            0x1063 @4020 local fn cuCtxSetSharedMemConfig(config: c_uint);
            0x1064 @11000 local fn cuCtxResetPersistingL2Cache();
            0x1065 @11040 local fn cuCtxGetExecAffinity(p_exec_affinity: *mut c_void, kind: c_uint);
            0x1066 @11030 forward fn cuFlushGPUDirectRDMAWrites(target: c_uint, scope: c_uint)
                => flush_rdma_writes(target: target, scope: scope) -> ();

            // modules and libraries
            0x1080 @2000 hand fn cuModuleLoad(module: *mut Handle, fname: *const c_char);
            0x1081 @2000 hand fn cuModuleLoadData(module: *mut Handle, image: *const c_void);
            0x1082 @2010 hand fn cuModuleLoadDataEx(module: *mut Handle, image: *const c_void, num_options: c_uint, options: *mut c_uint, option_values: *mut *mut c_void);
            0x1083 @2000 hand fn cuModuleLoadFatBinary(module: *mut Handle, fat_cubin: *const c_void);
            0x1084 @2000 scalar fn cuModuleUnload(hmod: Handle);
            0x1085 @2000 hand fn cuModuleGetFunction(hfunc: *mut Handle, hmod: Handle, name: *const c_char);
            0x1086 @12040 scalar fn cuModuleGetFunctionCount(count: *mut c_uint, hmod: Handle);
            0x1087 @12040 hand fn cuModuleEnumerateFunctions(functions: *mut Handle, num_functions: c_uint, hmod: Handle);
            0x1088 @3020 hand fn cuModuleGetGlobal_v2(dptr: *mut u64, bytes: *mut usize, hmod: Handle, name: *const c_char);
            0x1089 @11070 local fn cuModuleGetLoadingMode(mode: *mut c_uint);
            0x108a @12000 hand fn cuLibraryLoadData(library: *mut Handle, code: *const c_void, jit_options: *mut c_uint, jit_options_values: *mut *mut c_void, num_jit_options: c_uint, library_options: *mut c_uint, library_option_values: *mut *mut c_void, num_library_options: c_uint);
            0x108b @12000 hand fn cuLibraryLoadFromFile(library: *mut Handle, file_name: *const c_char, jit_options: *mut c_uint, jit_options_values: *mut *mut c_void, num_jit_options: c_uint, library_options: *mut c_uint, library_option_values: *mut *mut c_void, num_library_options: c_uint);
            0x108c @12000 scalar fn cuLibraryUnload(library: Handle);
            0x108d @12000 hand fn cuLibraryGetKernel(p_kernel: *mut Handle, library: Handle, name: *const c_char);
            0x108e @12040 scalar fn cuLibraryGetKernelCount(count: *mut c_uint, lib: Handle);
            0x108f @12040 hand fn cuLibraryEnumerateKernels(kernels: *mut Handle, num_kernels: c_uint, lib: Handle);
            0x1090 @12000 scalar fn cuLibraryGetModule(p_mod: *mut Handle, library: Handle);
            0x1091 @12000 hand fn cuLibraryGetGlobal(dptr: *mut u64, bytes: *mut usize, library: Handle, name: *const c_char);
            0x1092 @12000 hand fn cuKernelGetFunction(p_func: *mut Handle, kernel: Handle);
            0x1093 @12050 hand fn cuKernelGetLibrary(p_lib: *mut Handle, kernel: Handle);
            0x1094 @12000 scalar fn cuKernelGetAttribute(pi: *mut c_int, attrib: c_uint, kernel: Handle, dev: c_int);
            0x1095 @12000 scalar fn cuKernelSetAttribute(attrib: c_uint, val: c_int, kernel: Handle, dev: c_int);
            0x1096 @12000 hand fn cuKernelSetCacheConfig(kernel: Handle, config: c_uint, dev: c_int);
            0x1097 @12030 hand fn cuKernelGetName(name: *mut *const c_char, hfunc: Handle);
            0x1098 @12040 scalar fn cuKernelGetParamInfo(kernel: Handle, param_index: usize, param_offset: *mut usize, param_size: *mut usize);
            0x1099 @13020 hand fn cuKernelGetParamCount(kernel: Handle, param_count: *mut usize);
            0x109a @2020 scalar fn cuFuncGetAttribute(pi: *mut c_int, attrib: c_uint, hfunc: Handle);
            0x109b @9000 scalar fn cuFuncSetAttribute(hfunc: Handle, attrib: c_uint, value: c_int);
            0x109c @3000 hand fn cuFuncSetCacheConfig(hfunc: Handle, config: c_uint);
            0x109d @4020 hand fn cuFuncSetSharedMemConfig(hfunc: Handle, config: c_uint);
            0x109e @11000 hand fn cuFuncGetModule(hmod: *mut Handle, hfunc: Handle);
            0x109f @12030 hand fn cuFuncGetName(name: *mut *const c_char, hfunc: Handle);
            0x10a0 @12040 scalar fn cuFuncGetParamInfo(func: Handle, param_index: usize, param_offset: *mut usize, param_size: *mut usize);
            0x10a1 @13020 hand fn cuFuncGetParamCount(func: Handle, param_count: *mut usize);
            0x10a2 @12040 hand fn cuFuncIsLoaded(state: *mut c_uint, function: Handle);
            0x10a3 @12040 hand fn cuFuncLoad(function: Handle);
            0x10a4 @6050 forward fn cuOccupancyMaxActiveBlocksPerMultiprocessor(num_blocks: *mut c_int, func: Handle, block_size: c_int, dynamic_s_mem_size: usize)
                => occupancy_blocks(function: func, block: block_size, shared: dynamic_s_mem_size, flags: 0) -> (blocks: num_blocks);
            0x10a5 @7000 forward fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(num_blocks: *mut c_int, func: Handle, block_size: c_int, dynamic_s_mem_size: usize, flags: c_uint)
                => occupancy_blocks(function: func, block: block_size, shared: dynamic_s_mem_size, flags: flags) -> (blocks: num_blocks);
            0x10a6 @6050 hand fn cuOccupancyMaxPotentialBlockSize(min_grid_size: *mut c_int, block_size: *mut c_int, func: Handle, block_size_to_dynamic_s_mem_size: Option<BlockToShared>, dynamic_s_mem_size: usize, block_size_limit: c_int);
            0x10a7 @7000 hand fn cuOccupancyMaxPotentialBlockSizeWithFlags(min_grid_size: *mut c_int, block_size: *mut c_int, func: Handle, block_size_to_dynamic_s_mem_size: Option<BlockToShared>, dynamic_s_mem_size: usize, block_size_limit: c_int, flags: c_uint);
            0x10a8 @10020 forward fn cuOccupancyAvailableDynamicSMemPerBlock(dynamic_smem_size: *mut usize, func: Handle, num_blocks: c_int, block_size: c_int)
                => occupancy_shared(function: func, blocks: num_blocks, block: block_size) -> (bytes: dynamic_smem_size);
            0x10a9 @11070 hand fn cuOccupancyMaxPotentialClusterSize(cluster_size: *mut c_int, func: Handle, config: *const c_void);
            0x10aa @11070 hand fn cuOccupancyMaxActiveClusters(num_clusters: *mut c_int, func: Handle, config: *const c_void);

            0x10ab @12000 hand fn cuLibraryGetManaged(dptr: *mut u64, bytes: *mut usize, library: Handle, name: *const c_char);
            0x10ac @12000 hand fn cuLibraryGetUnifiedFunction(fptr: *mut *mut c_void, library: Handle, symbol: *const c_char);
            // the linker
            0x10b0 @6050 hand fn cuLinkCreate_v2(num_options: c_uint, options: *mut c_uint, option_values: *mut *mut c_void, state_out: *mut Handle);
            0x10b1 @5050 hand fn cuLinkCreate(num_options: c_uint, options: *mut c_uint, option_values: *mut *mut c_void, state_out: *mut Handle);
            0x10b2 @6050 hand fn cuLinkAddData_v2(state: Handle, kind: c_uint, data: *mut c_void, size: usize, name: *const c_char, num_options: c_uint, options: *mut c_uint, option_values: *mut *mut c_void);
            0x10b3 @5050 hand fn cuLinkAddData(state: Handle, kind: c_uint, data: *mut c_void, size: usize, name: *const c_char, num_options: c_uint, options: *mut c_uint, option_values: *mut *mut c_void);
            0x10b4 @6050 hand fn cuLinkAddFile_v2(state: Handle, kind: c_uint, path: *const c_char, num_options: c_uint, options: *mut c_uint, option_values: *mut *mut c_void);
            0x10b5 @5050 hand fn cuLinkAddFile(state: Handle, kind: c_uint, path: *const c_char, num_options: c_uint, options: *mut c_uint, option_values: *mut *mut c_void);
            0x10b6 @5050 hand fn cuLinkComplete(state: Handle, cubin_out: *mut *mut c_void, size_out: *mut usize);
            0x10b7 @5050 hand fn cuLinkDestroy(state: Handle);

            // launches
            0x10c0 @4000 hand fn cuLaunchKernel(f: Handle, grid_dim_x: c_uint, grid_dim_y: c_uint, grid_dim_z: c_uint, block_dim_x: c_uint, block_dim_y: c_uint, block_dim_z: c_uint, shared_mem_bytes: c_uint, h_stream: Handle, kernel_params: *mut *mut c_void, extra: *mut *mut c_void) also cuLaunchKernel_ptsz;
            0x10c1 @11060 hand fn cuLaunchKernelEx(config: *const c_void, f: Handle, kernel_params: *mut *mut c_void, extra: *mut *mut c_void) also cuLaunchKernelEx_ptsz;
            0x10c2 @9000 hand fn cuLaunchCooperativeKernel(f: Handle, grid_dim_x: c_uint, grid_dim_y: c_uint, grid_dim_z: c_uint, block_dim_x: c_uint, block_dim_y: c_uint, block_dim_z: c_uint, shared_mem_bytes: c_uint, h_stream: Handle, kernel_params: *mut *mut c_void) also cuLaunchCooperativeKernel_ptsz;

            0x10c3 @2000 hand fn cuFuncSetBlockShape(hfunc: Handle, x: c_int, y: c_int, z: c_int);
            0x10c4 @2000 hand fn cuFuncSetSharedSize(hfunc: Handle, bytes: c_uint);
            0x10c5 @2000 hand fn cuParamSetSize(hfunc: Handle, numbytes: c_uint);
            0x10c6 @2000 hand fn cuParamSeti(hfunc: Handle, offset: c_int, value: c_uint);
            0x10c7 @2000 hand fn cuParamSetf(hfunc: Handle, offset: c_int, value: f32);
            0x10c8 @2000 hand fn cuParamSetv(hfunc: Handle, offset: c_int, ptr: *const c_void, numbytes: c_uint);
            0x10c9 @2000 hand fn cuLaunch(f: Handle);
            0x10ca @2000 hand fn cuLaunchGrid(f: Handle, grid_width: c_int, grid_height: c_int);
            0x10cb @2000 hand fn cuLaunchGridAsync(f: Handle, grid_width: c_int, grid_height: c_int, h_stream: Handle);

            // memory
            0x10d0 @3020 hand fn cuMemAlloc_v2(dptr: *mut u64, bytesize: usize);
            0x10d1 @3020 hand fn cuMemAllocPitch_v2(dptr: *mut u64, p_pitch: *mut usize, width_in_bytes: usize, height: usize, element_size_bytes: c_uint);
            0x10d2 @3020 hand fn cuMemFree_v2(dptr: u64);
            0x10d3 @3020 hand fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
            0x10d4 @3020 hand fn cuMemGetAddressRange_v2(pbase: *mut u64, psize: *mut usize, dptr: u64);
            0x10d5 @2020 hand fn cuMemHostAlloc(pp: *mut *mut c_void, bytesize: usize, flags: c_uint);
            0x10d6 @3020 hand fn cuMemAllocHost_v2(pp: *mut *mut c_void, bytesize: usize);
            0x10d7 @2000 hand fn cuMemFreeHost(p: *mut c_void);
            0x10d8 @3020 hand fn cuMemHostGetDevicePointer_v2(pdptr: *mut u64, p: *mut c_void, flags: c_uint);
            0x10d9 @2030 hand fn cuMemHostGetFlags(p_flags: *mut c_uint, p: *mut c_void);
            0x10da @4000 hand fn cuPointerGetAttribute(data: *mut c_void, attribute: c_uint, ptr: u64);
            0x10db @7000 hand fn cuPointerGetAttributes(num_attributes: c_uint, attributes: *mut c_uint, data: *mut *mut c_void, ptr: u64);
            0x10dc @6000 hand fn cuPointerSetAttribute(value: *const c_void, attribute: c_uint, ptr: u64);

            // tensor maps
            0x10e0 @12000 hand fn cuTensorMapEncodeTiled(tensor_map: *mut c_void, tensor_data_type: c_uint, tensor_rank: c_uint, global_address: *mut c_void, global_dim: *const u64, global_strides: *const u64, box_dim: *const c_uint, element_strides: *const c_uint, interleave: c_uint, swizzle: c_uint, l2_promotion: c_uint, oob_fill: c_uint);
            0x10e1 @12000 hand fn cuTensorMapEncodeIm2col(tensor_map: *mut c_void, tensor_data_type: c_uint, tensor_rank: c_uint, global_address: *mut c_void, global_dim: *const u64, global_strides: *const u64, pixel_box_lower_corner: *const c_uint, pixel_box_upper_corner: *const c_uint, channels_per_pixel: c_uint, pixels_per_column: c_uint, element_strides: *const c_uint, interleave: c_uint, swizzle: c_uint, l2_promotion: c_uint, oob_fill: c_uint);
            0x10e2 @12080 hand fn cuTensorMapEncodeIm2colWide(tensor_map: *mut c_void, tensor_data_type: c_uint, tensor_rank: c_uint, global_address: *mut c_void, global_dim: *const u64, global_strides: *const u64, pixel_box_lower_corner_width: c_uint, pixel_box_upper_corner_width: c_uint, channels_per_pixel: c_uint, pixels_per_column: c_uint, element_strides: *const c_uint, interleave: c_uint, mode: c_uint, swizzle: c_uint, l2_promotion: c_uint, oob_fill: c_uint);
            0x10e3 @12000 hand fn cuTensorMapReplaceAddress(tensor_map: *mut c_void, global_address: *mut c_void);

            // copies
            0x10f0 @4000 hand fn cuMemcpy(dst: u64, src: u64, byte_count: usize) also cuMemcpy_ptds;
            0x10f1 @4000 hand fn cuMemcpyAsync(dst: u64, src: u64, byte_count: usize, h_stream: Handle) also cuMemcpyAsync_ptsz;
            0x10f2 @3020 hand fn cuMemcpyHtoD_v2(dst_device: u64, src_host: *const c_void, byte_count: usize) also cuMemcpyHtoD_v2_ptds;
            0x10f3 @3020 hand fn cuMemcpyDtoH_v2(dst_host: *mut c_void, src_device: u64, byte_count: usize) also cuMemcpyDtoH_v2_ptds;
            0x10f4 @3020 hand fn cuMemcpyDtoD_v2(dst_device: u64, src_device: u64, byte_count: usize) also cuMemcpyDtoD_v2_ptds;
            0x10f5 @3020 hand fn cuMemcpyHtoDAsync_v2(dst_device: u64, src_host: *const c_void, byte_count: usize, h_stream: Handle) also cuMemcpyHtoDAsync_v2_ptsz;
            0x10f6 @3020 hand fn cuMemcpyDtoHAsync_v2(dst_host: *mut c_void, src_device: u64, byte_count: usize, h_stream: Handle) also cuMemcpyDtoHAsync_v2_ptsz;
            0x10f7 @3020 hand fn cuMemcpyDtoDAsync_v2(dst_device: u64, src_device: u64, byte_count: usize, h_stream: Handle) also cuMemcpyDtoDAsync_v2_ptsz;
            0x10f8 @3020 hand fn cuMemcpy2D_v2(p_copy: *const c_void) also cuMemcpy2D_v2_ptds;
            0x10f9 @3020 hand fn cuMemcpy2DUnaligned_v2(p_copy: *const c_void) also cuMemcpy2DUnaligned_v2_ptds;
            0x10fa @3020 hand fn cuMemcpy2DAsync_v2(p_copy: *const c_void, h_stream: Handle) also cuMemcpy2DAsync_v2_ptsz;
            0x10fb @3020 hand fn cuMemcpy3D_v2(p_copy: *const c_void) also cuMemcpy3D_v2_ptds;
            0x10fc @3020 hand fn cuMemcpy3DAsync_v2(p_copy: *const c_void, h_stream: Handle) also cuMemcpy3DAsync_v2_ptsz;

            0x10fd @4000 hand fn cuMemcpyPeer(dst_device: u64, dst_context: Handle, src_device: u64, src_context: Handle, byte_count: usize) also cuMemcpyPeer_ptds;
            0x10fe @4000 hand fn cuMemcpyPeerAsync(dst_device: u64, dst_context: Handle, src_device: u64, src_context: Handle, byte_count: usize, h_stream: Handle) also cuMemcpyPeerAsync_ptsz;
            0x10ff @4000 hand fn cuMemcpy3DPeer(p_copy: *const c_void) also cuMemcpy3DPeer_ptds;
            0x1100 @4000 hand fn cuMemcpy3DPeerAsync(p_copy: *const c_void, h_stream: Handle) also cuMemcpy3DPeerAsync_ptsz;
            0x1101 @12080 hand fn cuMemcpyBatchAsync(dsts: *const u64, srcs: *const u64, sizes: *const usize, count: usize, attrs: *const c_void, attrs_idxs: *const usize, num_attrs: usize, fail_idx: *mut usize, h_stream: Handle) also cuMemcpyBatchAsync_ptsz;
            0x1102 @13000 hand fn cuMemcpyBatchAsync_v2(dsts: *const u64, srcs: *const u64, sizes: *const usize, count: usize, attrs: *const c_void, attrs_idxs: *const usize, num_attrs: usize, h_stream: Handle) also cuMemcpyBatchAsync_v2_ptsz;
            0x1103 @12080 hand fn cuMemcpy3DBatchAsync(num_ops: usize, op_list: *const c_void, fail_idx: *mut usize, flags: u64, h_stream: Handle) also cuMemcpy3DBatchAsync_ptsz;
            0x1104 @13000 hand fn cuMemcpy3DBatchAsync_v2(num_ops: usize, op_list: *const c_void, flags: u64, h_stream: Handle) also cuMemcpy3DBatchAsync_v2_ptsz;
            0x1105 @13020 hand fn cuMemcpyWithAttributesAsync(dst: u64, src: u64, size: usize, attr: *const c_void, h_stream: Handle) also cuMemcpyWithAttributesAsync_ptsz;
            0x1106 @13020 hand fn cuMemcpy3DWithAttributesAsync(op: *const c_void, flags: u64, h_stream: Handle) also cuMemcpy3DWithAttributesAsync_ptsz;

            // memsets
            0x1110 @3020 hand fn cuMemsetD8_v2(dst_device: u64, uc: u8, n: usize) also cuMemsetD8_v2_ptds;
            0x1111 @3020 hand fn cuMemsetD16_v2(dst_device: u64, us: u16, n: usize) also cuMemsetD16_v2_ptds;
            0x1112 @3020 hand fn cuMemsetD32_v2(dst_device: u64, ui: c_uint, n: usize) also cuMemsetD32_v2_ptds;
            0x1113 @3020 hand fn cuMemsetD8Async(dst_device: u64, uc: u8, n: usize, h_stream: Handle) also cuMemsetD8Async_ptsz;
            0x1114 @3020 hand fn cuMemsetD16Async(dst_device: u64, us: u16, n: usize, h_stream: Handle) also cuMemsetD16Async_ptsz;
            0x1115 @3020 hand fn cuMemsetD32Async(dst_device: u64, ui: c_uint, n: usize, h_stream: Handle) also cuMemsetD32Async_ptsz;
            0x1116 @3020 hand fn cuMemsetD2D8_v2(dst_device: u64, dst_pitch: usize, uc: u8, width: usize, height: usize) also cuMemsetD2D8_v2_ptds;
            0x1117 @3020 hand fn cuMemsetD2D16_v2(dst_device: u64, dst_pitch: usize, us: u16, width: usize, height: usize) also cuMemsetD2D16_v2_ptds;
            0x1118 @3020 hand fn cuMemsetD2D32_v2(dst_device: u64, dst_pitch: usize, ui: c_uint, width: usize, height: usize) also cuMemsetD2D32_v2_ptds;
            0x1119 @3020 hand fn cuMemsetD2D8Async(dst_device: u64, dst_pitch: usize, uc: u8, width: usize, height: usize, h_stream: Handle) also cuMemsetD2D8Async_ptsz;
            0x111a @3020 hand fn cuMemsetD2D16Async(dst_device: u64, dst_pitch: usize, us: u16, width: usize, height: usize, h_stream: Handle) also cuMemsetD2D16Async_ptsz;
            0x111b @3020 hand fn cuMemsetD2D32Async(dst_device: u64, dst_pitch: usize, ui: c_uint, width: usize, height: usize, h_stream: Handle) also cuMemsetD2D32Async_ptsz;

            // streams
            0x1130 @2000 hand fn cuStreamCreate(ph_stream: *mut Handle, flags: c_uint);
            0x1131 @5050 scalar fn cuStreamCreateWithPriority(ph_stream: *mut Handle, flags: c_uint, priority: c_int);
            0x1132 @4000 scalar fn cuStreamDestroy_v2(h_stream: Handle);
            0x1133 @2000 hand fn cuStreamDestroy(h_stream: Handle);
            0x1134 @2000 scalar fn cuStreamSynchronize(h_stream: Handle) also cuStreamSynchronize_ptsz;
            0x1135 @2000 hand fn cuStreamQuery(h_stream: Handle) also cuStreamQuery_ptsz;
            0x1136 @3020 scalar fn cuStreamWaitEvent(h_stream: Handle, h_event: Handle, flags: c_uint) also cuStreamWaitEvent_ptsz;
            0x1137 @5050 local fn cuStreamGetFlags(h_stream: Handle, flags: *mut c_uint) also cuStreamGetFlags_ptsz;
            0x1138 @5050 local fn cuStreamGetPriority(h_stream: Handle, priority: *mut c_int) also cuStreamGetPriority_ptsz;
            0x1139 @9020 local fn cuStreamGetCtx(h_stream: Handle, pctx: *mut Handle) also cuStreamGetCtx_ptsz;
            0x113a @12050 local fn cuStreamGetCtx_v2(h_stream: Handle, p_ctx: *mut Handle, p_green_ctx: *mut c_void) also cuStreamGetCtx_v2_ptsz;
            0x113b @12000 local fn cuStreamGetId(h_stream: Handle, stream_id: *mut u64) also cuStreamGetId_ptsz;
            0x113c @12080 local fn cuStreamGetDevice(h_stream: Handle, device: *mut c_int) also cuStreamGetDevice_ptsz;
            0x113d @10000 local fn cuStreamIsCapturing(h_stream: Handle, capture_status: *mut c_uint) also cuStreamIsCapturing_ptsz;
            0x113e @11030 local fn cuStreamGetCaptureInfo_v2(h_stream: Handle, capture_status_out: *mut c_uint, id_out: *mut u64, graph_out: *mut Handle, dependencies_out: *mut *const c_void, num_dependencies_out: *mut usize) also cuStreamGetCaptureInfo_v2_ptsz;
            0x113f @12030 local fn cuStreamGetCaptureInfo_v3(h_stream: Handle, capture_status_out: *mut c_uint, id_out: *mut u64, graph_out: *mut Handle, dependencies_out: *mut *const c_void, edge_data_out: *mut *const c_void, num_dependencies_out: *mut usize) also cuStreamGetCaptureInfo_v3_ptsz;
            0x1140 @10010 local fn cuThreadExchangeStreamCaptureMode(mode: *mut c_uint);

            0x1141 @11070 hand fn cuStreamWriteValue32_v2(h_stream: Handle, addr: u64, value: c_uint, flags: c_uint) also cuStreamWriteValue32_v2_ptsz;
            0x1142 @11070 hand fn cuStreamWriteValue64_v2(h_stream: Handle, addr: u64, value: u64, flags: c_uint) also cuStreamWriteValue64_v2_ptsz;

            0x1143 @11000 hand fn cuStreamGetAttribute(h_stream: Handle, attr: c_uint, value_out: *mut c_void) also cuStreamGetAttribute_ptsz;
            0x1144 @11000 hand fn cuStreamSetAttribute(h_stream: Handle, attr: c_uint, value: *const c_void) also cuStreamSetAttribute_ptsz;
            0x1145 @11000 hand fn cuStreamCopyAttributes(dst: Handle, src: Handle) also cuStreamCopyAttributes_ptsz;
            // host functions
            0x1148 @10000 hand fn cuLaunchHostFunc(h_stream: Handle, function: Option<HostFunction>, user_data: *mut c_void) also cuLaunchHostFunc_ptsz;
            0x1149 @13010 hand fn cuLaunchHostFunc_v2(h_stream: Handle, function: Option<HostFunction>, user_data: *mut c_void, sync_mode: c_uint) also cuLaunchHostFunc_v2_ptsz;
            0x114a @5000 hand fn cuStreamAddCallback(h_stream: Handle, callback: Option<StreamCallback>, user_data: *mut c_void, flags: c_uint) also cuStreamAddCallback_ptsz;

            // events
            0x1150 @2000 scalar fn cuEventCreate(ph_event: *mut Handle, flags: c_uint);
            0x1151 @4000 scalar fn cuEventDestroy_v2(h_event: Handle);
            0x1152 @2000 hand fn cuEventDestroy(h_event: Handle);
            0x1153 @2000 scalar fn cuEventRecord(h_event: Handle, h_stream: Handle) also cuEventRecord_ptsz;
            0x1154 @11010 hand fn cuEventRecordWithFlags(h_event: Handle, h_stream: Handle, flags: c_uint) also cuEventRecordWithFlags_ptsz;
            0x1155 @2000 hand fn cuEventQuery(h_event: Handle);
            0x1156 @2000 scalar fn cuEventSynchronize(h_event: Handle);
            0x1157 @2000 hand fn cuEventElapsedTime(p_milliseconds: *mut f32, h_start: Handle, h_end: Handle);
            0x1158 @12080 hand fn cuEventElapsedTime_v2(p_milliseconds: *mut f32, h_start: Handle, h_end: Handle);

            // virtual memory; `driver`: used by the worker on the driver, a guest gets CUDA_ERROR_NOT_SUPPORTED
            0x1170 @10020 hand fn cuMemGetAllocationGranularity(granularity: *mut usize, prop: *const c_void, option: c_uint);
            0x1171 @10020 hand fn cuMemCreate(handle: *mut Handle, size: usize, prop: *const c_void, flags: u64);
            0x1172 @10020 scalar fn cuMemRelease(handle: Handle);
            0x1173 @10020 hand fn cuMemAddressReserve(ptr: *mut u64, size: usize, alignment: usize, addr: u64, flags: u64);
            0x1174 @10020 hand fn cuMemAddressFree(ptr: u64, size: usize);
            0x1175 @10020 hand fn cuMemMap(ptr: u64, size: usize, offset: usize, handle: Handle, flags: u64);
            0x1176 @10020 hand fn cuMemUnmap(ptr: u64, size: usize);
            0x1177 @10020 hand fn cuMemSetAccess(ptr: u64, size: usize, desc: *const c_void, count: usize);
            0x1178 @6050 hand fn cuMemHostRegister_v2(p: *mut c_void, bytesize: usize, flags: c_uint);
            0x1179 @4000 hand fn cuMemHostUnregister(p: *mut c_void);
            0x117a @10020 hand fn cuMemExportToShareableHandle(shareable_handle: *mut c_void, handle: Handle, handle_type: c_uint, flags: u64);
            0x117b @10020 hand fn cuMemImportFromShareableHandle(handle: *mut Handle, os_handle: *mut c_void, sh_handle_type: c_uint);
            0x117c @11000 hand fn cuMemRetainAllocationHandle(handle: *mut Handle, addr: *mut c_void);
            0x117d @10020 hand fn cuMemGetAllocationPropertiesFromHandle(prop: *mut c_void, handle: Handle);
            0x117e @10020 hand fn cuMemGetAccess(flags: *mut u64, location: *const c_void, ptr: u64);

            // memory in the order of streams, and pools
            0x1180 @11020 hand fn cuMemAllocAsync(dptr: *mut u64, bytesize: usize, h_stream: Handle) also cuMemAllocAsync_ptsz;
            0x1181 @11020 hand fn cuMemAllocFromPoolAsync(dptr: *mut u64, bytesize: usize, pool: Handle, h_stream: Handle) also cuMemAllocFromPoolAsync_ptsz;
            0x1182 @11020 hand fn cuMemFreeAsync(dptr: u64, h_stream: Handle) also cuMemFreeAsync_ptsz;
            0x1183 @11020 hand fn cuMemPoolCreate(pool: *mut Handle, pool_props: *const c_void);
            0x1184 @11020 hand fn cuMemPoolDestroy(pool: Handle);
            0x1185 @11020 hand fn cuMemPoolTrimTo(pool: Handle, min_bytes_to_keep: usize);
            0x1186 @11020 hand fn cuMemPoolSetAttribute(pool: Handle, attr: c_uint, value: *mut c_void);
            0x1187 @11020 hand fn cuMemPoolGetAttribute(pool: Handle, attr: c_uint, value: *mut c_void);
            0x1188 @11020 hand fn cuMemPoolSetAccess(pool: Handle, map: *const c_void, count: usize);
            0x1189 @11020 hand fn cuMemPoolGetAccess(flags: *mut c_uint, mem_pool: Handle, location: *mut c_void);
            0x118a @11020 hand fn cuDeviceGetDefaultMemPool(pool_out: *mut Handle, dev: c_int);
            0x118b @11020 hand fn cuDeviceGetMemPool(pool: *mut Handle, dev: c_int);
            0x118c @11020 hand fn cuDeviceSetMemPool(dev: c_int, pool: Handle);
            0x118d @11040 contextless fn cuDeviceGraphMemTrim(device: c_int)
                => graph_memory_trim(device: device) -> ();

            // memory of other processes
            0x1190 @4010 hand fn cuIpcGetMemHandle(p_handle: *mut c_void, dptr: u64);
            0x1191 @11000 hand fn cuIpcOpenMemHandle_v2(pdptr: *mut u64, handle: IpcHandle, flags: c_uint);
            0x1192 @4010 hand fn cuIpcOpenMemHandle(pdptr: *mut u64, handle: IpcHandle, flags: c_uint);
            0x1193 @4010 hand fn cuIpcCloseMemHandle(dptr: u64);

            // pools by location
            0x1194 @13000 hand fn cuMemGetDefaultMemPool(pool_out: *mut Handle, location: *const c_void, kind: c_uint);
            0x1195 @13000 hand fn cuMemGetMemPool(pool: *mut Handle, location: *const c_void, kind: c_uint);
            0x1196 @13000 hand fn cuMemSetMemPool(location: *const c_void, kind: c_uint, pool: Handle);

            // managed memory; a location by value fills one register, its kind in the low half
            0x11a0 @6000 hand fn cuMemAllocManaged(dptr: *mut u64, bytesize: usize, flags: c_uint);
            0x11a1 @8000 hand fn cuMemPrefetchAsync(dev_ptr: u64, count: usize, dst_device: c_int, h_stream: Handle) also cuMemPrefetchAsync_ptsz;
            0x11a2 @12020 hand fn cuMemPrefetchAsync_v2(dev_ptr: u64, count: usize, location: u64, flags: c_uint, h_stream: Handle) also cuMemPrefetchAsync_v2_ptsz;
            0x11a3 @8000 hand fn cuMemAdvise(dev_ptr: u64, count: usize, advice: c_uint, device: c_int);
            0x11a4 @12020 hand fn cuMemAdvise_v2(dev_ptr: u64, count: usize, advice: c_uint, location: u64);
            0x11a5 @8000 hand fn cuMemRangeGetAttribute(data: *mut c_void, data_size: usize, attribute: c_uint, dev_ptr: u64, count: usize);
            0x11a6 @8000 hand fn cuMemRangeGetAttributes(data: *mut *mut c_void, data_sizes: *mut usize, attributes: *mut c_uint, num_attributes: usize, dev_ptr: u64, count: usize);
            0x11a7 @6000 hand fn cuStreamAttachMemAsync(h_stream: Handle, dptr: u64, length: usize, flags: c_uint) also cuStreamAttachMemAsync_ptsz;

            0x11a8 @13000 hand fn cuMemPrefetchBatchAsync(dptrs: *const u64, sizes: *const usize, count: usize, prefetch_locs: *const c_void, prefetch_loc_idxs: *const usize, num_prefetch_locs: usize, flags: u64, h_stream: Handle) also cuMemPrefetchBatchAsync_ptsz;
            0x11a9 @13000 hand fn cuMemDiscardBatchAsync(dptrs: *const u64, sizes: *const usize, count: usize, flags: u64, h_stream: Handle) also cuMemDiscardBatchAsync_ptsz;
            0x11aa @13000 hand fn cuMemDiscardAndPrefetchBatchAsync(dptrs: *const u64, sizes: *const usize, count: usize, prefetch_locs: *const c_void, prefetch_loc_idxs: *const usize, num_prefetch_locs: usize, flags: u64, h_stream: Handle) also cuMemDiscardAndPrefetchBatchAsync_ptsz;

            // graphs
            0x11b0 @10000 local fn cuGraphCreate(place: *mut Handle, flags: c_uint);
            0x11b1 @10000 local fn cuGraphDestroy(graph: Handle);
            0x11b2 @10000 local fn cuGraphClone(place: *mut Handle, original: Handle);
            0x11b3 @10000 local fn cuGraphNodeFindInClone(place: *mut Handle, original: Handle, clone: Handle);
            0x11b4 @10000 local fn cuGraphGetNodes(graph: Handle, nodes: *mut Handle, count: *mut usize);
            0x11b5 @10000 local fn cuGraphGetRootNodes(graph: Handle, nodes: *mut Handle, count: *mut usize);
            0x11b6 @10000 local fn cuGraphGetEdges(graph: Handle, from: *mut Handle, to: *mut Handle, count: *mut usize);
            0x11b7 @12030 local fn cuGraphGetEdges_v2(graph: Handle, from: *mut Handle, to: *mut Handle, data: *mut c_void, count: *mut usize);
            0x11b8 @10000 local fn cuGraphNodeGetDependencies(node: Handle, nodes: *mut Handle, count: *mut usize);
            0x11b9 @12030 local fn cuGraphNodeGetDependencies_v2(node: Handle, nodes: *mut Handle, data: *mut c_void, count: *mut usize);
            0x11ba @10000 local fn cuGraphNodeGetDependentNodes(node: Handle, nodes: *mut Handle, count: *mut usize);
            0x11bb @12030 local fn cuGraphNodeGetDependentNodes_v2(node: Handle, nodes: *mut Handle, data: *mut c_void, count: *mut usize);
            0x11bc @10000 local fn cuGraphAddDependencies(graph: Handle, from: *const Handle, to: *const Handle, count: usize);
            0x11bd @12030 local fn cuGraphAddDependencies_v2(graph: Handle, from: *const Handle, to: *const Handle, data: *const c_void, count: usize);
            0x11be @10000 local fn cuGraphRemoveDependencies(graph: Handle, from: *const Handle, to: *const Handle, count: usize);
            0x11bf @12030 local fn cuGraphRemoveDependencies_v2(graph: Handle, from: *const Handle, to: *const Handle, data: *const c_void, count: usize);
            0x11c0 @10000 local fn cuGraphDestroyNode(node: Handle);
            0x11c1 @10000 local fn cuGraphNodeGetType(node: Handle, kind: *mut c_uint);
            0x11c2 @13010 local fn cuGraphNodeGetContainingGraph(node: Handle, graph: *mut Handle);
            0x11c3 @13010 local fn cuGraphNodeGetLocalId(node: Handle, id: *mut c_uint);
            0x11c4 @13010 local fn cuGraphNodeGetToolsId(node: Handle, id: *mut u64);
            0x11c5 @13010 local fn cuGraphGetId(graph: Handle, id: *mut c_uint);
            0x11c6 @11030 local fn cuGraphDebugDotPrint(graph: Handle, path: *const c_char, flags: c_uint);
            0x11c7 @10000 local fn cuGraphAddKernelNode(place: *mut Handle, graph: Handle, before: *const Handle, count: usize, parameters: *const c_void);
            0x11c8 @12000 local fn cuGraphAddKernelNode_v2(place: *mut Handle, graph: Handle, before: *const Handle, count: usize, parameters: *const c_void);
            0x11c9 @10000 local fn cuGraphAddMemcpyNode(place: *mut Handle, graph: Handle, before: *const Handle, count: usize, parameters: *const c_void, context: Handle);
            0x11ca @10000 local fn cuGraphAddMemsetNode(place: *mut Handle, graph: Handle, before: *const Handle, count: usize, parameters: *const c_void, context: Handle);
            0x11cb @10000 local fn cuGraphAddHostNode(place: *mut Handle, graph: Handle, before: *const Handle, count: usize, parameters: *const c_void);
            0x11cc @10000 local fn cuGraphAddChildGraphNode(place: *mut Handle, graph: Handle, before: *const Handle, count: usize, child: Handle);
            0x11cd @10000 local fn cuGraphChildGraphNodeGetGraph(node: Handle, graph: *mut Handle);
            0x11ce @10000 local fn cuGraphAddEmptyNode(place: *mut Handle, graph: Handle, before: *const Handle, count: usize);
            0x11cf @11010 local fn cuGraphAddEventRecordNode(place: *mut Handle, graph: Handle, before: *const Handle, count: usize, event: Handle);
            0x11d0 @11010 local fn cuGraphAddEventWaitNode(place: *mut Handle, graph: Handle, before: *const Handle, count: usize, event: Handle);
            0x11d1 @11070 local fn cuGraphAddBatchMemOpNode(place: *mut Handle, graph: Handle, before: *const Handle, count: usize, parameters: *const c_void);
            0x11d2 @12020 local fn cuGraphAddNode(place: *mut Handle, graph: Handle, before: *const Handle, count: usize, parameters: *mut c_void);
            0x11d3 @12030 local fn cuGraphAddNode_v2(place: *mut Handle, graph: Handle, before: *const Handle, data: *const c_void, count: usize, parameters: *mut c_void);
            0x11d4 @13040 local fn cuGraphAddNode_v3(place: *mut Handle, graph: Handle, before: *const Handle, data: *const c_void, count: usize, parameters: *mut c_void);
            0x11d5 @11040 local fn cuGraphAddMemAllocNode(place: *mut Handle, graph: Handle, before: *const Handle, count: usize, parameters: *mut c_void);
            0x11d6 @11040 local fn cuGraphAddMemFreeNode(place: *mut Handle, graph: Handle, before: *const Handle, count: usize, address: u64);
            0x11d7 @12030 local fn cuGraphConditionalHandleCreate(place: *mut Handle, graph: Handle, context: Handle, value: c_uint, flags: c_uint);
            0x11d8 @10000 local fn cuGraphKernelNodeGetParams(node: Handle, parameters: *mut c_void);
            0x11d9 @12000 local fn cuGraphKernelNodeGetParams_v2(node: Handle, parameters: *mut c_void);
            0x11da @10000 local fn cuGraphKernelNodeSetParams(node: Handle, parameters: *const c_void);
            0x11db @12000 local fn cuGraphKernelNodeSetParams_v2(node: Handle, parameters: *const c_void);
            0x11dc @10000 local fn cuGraphMemcpyNodeGetParams(node: Handle, parameters: *mut c_void);
            0x11dd @10000 local fn cuGraphMemcpyNodeSetParams(node: Handle, parameters: *const c_void);
            0x11de @10000 local fn cuGraphMemsetNodeGetParams(node: Handle, parameters: *mut c_void);
            0x11df @10000 local fn cuGraphMemsetNodeSetParams(node: Handle, parameters: *const c_void);
            0x11e0 @10000 local fn cuGraphHostNodeGetParams(node: Handle, parameters: *mut c_void);
            0x11e1 @10000 local fn cuGraphHostNodeSetParams(node: Handle, parameters: *const c_void);
            0x11e2 @11010 local fn cuGraphEventRecordNodeGetEvent(node: Handle, event: *mut Handle);
            0x11e3 @11010 local fn cuGraphEventRecordNodeSetEvent(node: Handle, event: Handle);
            0x11e4 @11010 local fn cuGraphEventWaitNodeGetEvent(node: Handle, event: *mut Handle);
            0x11e5 @11010 local fn cuGraphEventWaitNodeSetEvent(node: Handle, event: Handle);
            0x11e6 @11070 local fn cuGraphBatchMemOpNodeGetParams(node: Handle, parameters: *mut c_void);
            0x11e7 @11070 local fn cuGraphBatchMemOpNodeSetParams(node: Handle, parameters: *const c_void);
            0x11e8 @12020 local fn cuGraphNodeSetParams(node: Handle, parameters: *const c_void);
            0x11e9 @13040 local fn cuGraphNodeSetParams_v2(node: Handle, parameters: *const c_void);
            0x11ea @13020 local fn cuGraphNodeGetParams(node: Handle, parameters: *mut c_void);
            0x11eb @11000 local fn cuGraphKernelNodeGetAttribute(node: Handle, id: c_uint, value: *mut c_void);
            0x11ec @11000 local fn cuGraphKernelNodeSetAttribute(node: Handle, id: c_uint, value: *const c_void);
            0x11ed @11000 local fn cuGraphKernelNodeCopyAttributes(to: Handle, from: Handle);
            0x11ee @10000 hand fn cuGraphInstantiate(place: *mut Handle, graph: Handle, node: *mut Handle, text: *mut c_char, room: usize);
            0x11ef @11000 hand fn cuGraphInstantiate_v2(place: *mut Handle, graph: Handle, node: *mut Handle, text: *mut c_char, room: usize);
            0x11f0 @11040 hand fn cuGraphInstantiateWithFlags(place: *mut Handle, graph: Handle, flags: u64);
            0x11f1 @10000 scalar fn cuGraphExecDestroy(executable: Handle);
            0x11f2 @12000 local fn cuGraphExecGetFlags(executable: Handle, flags: *mut u64);
            0x11f3 @13010 local fn cuGraphExecGetId(executable: Handle, id: *mut c_uint);
            0x11f4 @10010 hand fn cuGraphExecKernelNodeSetParams(executable: Handle, node: Handle, parameters: *const c_void);
            0x11f5 @12000 hand fn cuGraphExecKernelNodeSetParams_v2(executable: Handle, node: Handle, parameters: *const c_void);
            0x11f6 @10020 hand fn cuGraphExecMemcpyNodeSetParams(executable: Handle, node: Handle, parameters: *const c_void, context: Handle);
            0x11f7 @10020 hand fn cuGraphExecMemsetNodeSetParams(executable: Handle, node: Handle, parameters: *const c_void, context: Handle);
            0x11f8 @10020 hand fn cuGraphExecHostNodeSetParams(executable: Handle, node: Handle, parameters: *const c_void);
            0x11f9 @11010 scalar fn cuGraphExecChildGraphNodeSetParams(executable: Handle, node: Handle, child: Handle);
            0x11fa @11010 hand fn cuGraphExecEventRecordNodeSetEvent(executable: Handle, node: Handle, event: Handle);
            0x11fb @11010 hand fn cuGraphExecEventWaitNodeSetEvent(executable: Handle, node: Handle, event: Handle);
            0x11fc @11070 hand fn cuGraphExecBatchMemOpNodeSetParams(executable: Handle, node: Handle, parameters: *const c_void);
            0x11fd @12020 hand fn cuGraphExecNodeSetParams(executable: Handle, node: Handle, parameters: *const c_void);
            0x11fe @11060 scalar fn cuGraphNodeSetEnabled(executable: Handle, node: Handle, enabled: c_uint);
            0x11ff @11060 local fn cuGraphNodeGetEnabled(executable: Handle, node: Handle, enabled: *mut c_uint);
            0x1200 @10020 hand fn cuGraphExecUpdate(executable: Handle, graph: Handle, node: *mut Handle, result: *mut c_uint);
            0x1201 @12000 hand fn cuGraphExecUpdate_v2(executable: Handle, graph: Handle, result: *mut c_void);
            0x1202 @11030 local fn cuUserObjectCreate(place: *mut Handle, data: *mut c_void, destroy: Option<HostFunction>, references: c_uint, flags: c_uint);
            0x1203 @11030 local fn cuUserObjectRetain(object: Handle, count: c_uint);
            0x1204 @11030 local fn cuUserObjectRelease(object: Handle, count: c_uint);
            0x1205 @11030 local fn cuGraphRetainUserObject(graph: Handle, object: Handle, count: c_uint, flags: c_uint);
            0x1206 @11030 local fn cuGraphReleaseUserObject(graph: Handle, object: Handle, count: c_uint);
            0x1207 @12000 hand fn cuGraphInstantiateWithParams(place: *mut Handle, graph: Handle, parameters: *mut c_void) also cuGraphInstantiateWithParams_ptsz;
            0x1208 @10000 scalar fn cuGraphLaunch(executable: Handle, stream: Handle) also cuGraphLaunch_ptsz;
            0x1209 @11010 hand fn cuGraphUpload(executable: Handle, stream: Handle) also cuGraphUpload_ptsz;
            0x120a @11040 local fn cuGraphMemAllocNodeGetParams(node: Handle, parameters: *mut c_void);
            0x120b @11040 local fn cuGraphMemFreeNodeGetParams(node: Handle, address: *mut u64);

            // capture of streams
            0x1220 @10010 local fn cuStreamGetCaptureInfo(stream: Handle, status: *mut c_uint, id: *mut u64) also cuStreamGetCaptureInfo_ptsz;
            0x1221 @10000 local fn cuStreamBeginCapture(stream: Handle) also cuStreamBeginCapture_ptsz;
            0x1222 @10010 local fn cuStreamBeginCapture_v2(stream: Handle, mode: c_uint) also cuStreamBeginCapture_v2_ptsz;
            0x1223 @12030 local fn cuStreamBeginCaptureToGraph(stream: Handle, graph: Handle, before: *const Handle, data: *const c_void, count: usize, mode: c_uint) also cuStreamBeginCaptureToGraph_ptsz;
            0x1224 @10000 local fn cuStreamEndCapture(stream: Handle, graph: *mut Handle) also cuStreamEndCapture_ptsz;
            0x1225 @11030 local fn cuStreamUpdateCaptureDependencies(stream: Handle, nodes: *const Handle, count: usize, flags: c_uint) also cuStreamUpdateCaptureDependencies_ptsz;
            0x1226 @12030 local fn cuStreamUpdateCaptureDependencies_v2(stream: Handle, nodes: *const Handle, data: *const c_void, count: usize, flags: c_uint) also cuStreamUpdateCaptureDependencies_v2_ptsz;
            0x1227 @13030 local fn cuStreamBeginRecaptureToGraph(stream: Handle, mode: c_uint, graph: Handle, judge: *mut c_void, data: *mut c_void) also cuStreamBeginRecaptureToGraph_ptsz;

            // arrays
            0x1260 @3020 hand fn cuArrayCreate_v2(array: *mut Handle, descriptor: *const c_void);
            0x1261 @3020 hand fn cuArray3DCreate_v2(array: *mut Handle, descriptor: *const c_void);
            0x1262 @2000 scalar fn cuArrayDestroy(array: Handle);
            0x1263 @3020 hand fn cuArrayGetDescriptor_v2(descriptor: *mut c_void, array: Handle);
            0x1264 @3020 hand fn cuArray3DGetDescriptor_v2(descriptor: *mut c_void, array: Handle);
            0x1265 @11010 hand fn cuArrayGetSparseProperties(properties: *mut c_void, array: Handle);
            0x1266 @11060 hand fn cuArrayGetMemoryRequirements(requirements: *mut c_void, array: Handle, device: c_int);
            0x1267 @11020 hand fn cuArrayGetPlane(plane_array: *mut Handle, array: Handle, plane: c_uint);
            0x1268 @5000 hand fn cuMipmappedArrayCreate(array: *mut Handle, descriptor: *const c_void, levels: c_uint);
            0x1269 @5000 scalar fn cuMipmappedArrayGetLevel(level_array: *mut Handle, array: Handle, level: c_uint);
            0x126a @5000 scalar fn cuMipmappedArrayDestroy(array: Handle);
            0x126b @11010 hand fn cuMipmappedArrayGetSparseProperties(properties: *mut c_void, array: Handle);
            0x126c @11060 hand fn cuMipmappedArrayGetMemoryRequirements(requirements: *mut c_void, array: Handle, device: c_int);

            // copies with arrays of one dimension
            0x1270 @3020 hand fn cuMemcpyAtoA_v2(dst: Handle, dst_offset: usize, src: Handle, src_offset: usize, bytes: usize) also cuMemcpyAtoA_v2_ptds;
            0x1271 @3020 hand fn cuMemcpyAtoD_v2(dst: u64, src: Handle, src_offset: usize, bytes: usize) also cuMemcpyAtoD_v2_ptds;
            0x1272 @3020 hand fn cuMemcpyAtoH_v2(dst: *mut c_void, src: Handle, src_offset: usize, bytes: usize) also cuMemcpyAtoH_v2_ptds;
            0x1273 @3020 hand fn cuMemcpyDtoA_v2(dst: Handle, dst_offset: usize, src: u64, bytes: usize) also cuMemcpyDtoA_v2_ptds;
            0x1274 @3020 hand fn cuMemcpyHtoA_v2(dst: Handle, dst_offset: usize, src: *const c_void, bytes: usize) also cuMemcpyHtoA_v2_ptds;
            0x1275 @3020 hand fn cuMemcpyAtoHAsync_v2(dst: *mut c_void, src: Handle, src_offset: usize, bytes: usize, stream: Handle) also cuMemcpyAtoHAsync_v2_ptsz;
            0x1276 @3020 hand fn cuMemcpyHtoAAsync_v2(dst: Handle, dst_offset: usize, src: *const c_void, bytes: usize, stream: Handle) also cuMemcpyHtoAAsync_v2_ptsz;

            // texture and surface objects
            0x1280 @5000 hand fn cuTexObjectCreate(texture: *mut u64, resource: *const c_void, sampling: *const c_void, view: *const c_void);
            0x1281 @5000 scalar fn cuTexObjectDestroy(texture: u64);
            0x1282 @5000 hand fn cuTexObjectGetResourceDesc(resource: *mut c_void, texture: u64);
            0x1283 @5000 hand fn cuTexObjectGetTextureDesc(sampling: *mut c_void, texture: u64);
            0x1284 @5000 hand fn cuTexObjectGetResourceViewDesc(view: *mut c_void, texture: u64);
            0x1285 @5000 hand fn cuSurfObjectCreate(surface: *mut u64, resource: *const c_void);
            0x1286 @5000 scalar fn cuSurfObjectDestroy(surface: u64);
            0x1287 @5000 hand fn cuSurfObjectGetResourceDesc(resource: *mut c_void, surface: u64);

            // texture and surface references
            0x1290 @2000 hand fn cuModuleGetTexRef(reference: *mut Handle, module: Handle, name: *const c_char);
            0x1291 @3000 hand fn cuModuleGetSurfRef(reference: *mut Handle, module: Handle, name: *const c_char);
            0x1292 @2000 hand fn cuParamSetTexRef(function: Handle, unit: c_int, reference: Handle);
            0x1293 @2000 hand fn cuTexRefCreate(reference: *mut Handle);
            0x1294 @2000 hand fn cuTexRefDestroy(reference: Handle);
            0x1295 @2000 hand fn cuTexRefSetArray(reference: Handle, array: Handle, flags: c_uint);
            0x1296 @5000 hand fn cuTexRefSetMipmappedArray(reference: Handle, array: Handle, flags: c_uint);
            0x1297 @3020 hand fn cuTexRefSetAddress_v2(offset: *mut usize, reference: Handle, address: u64, bytes: usize);
            0x1298 @3020 hand fn cuTexRefSetAddress2D_v2(reference: Handle, descriptor: *const c_void, address: u64, pitch: usize);
            0x1299 @4010 hand fn cuTexRefSetAddress2D_v3(reference: Handle, descriptor: *const c_void, address: u64, pitch: usize);
            0x129a @2000 hand fn cuTexRefSetFormat(reference: Handle, format: c_uint, channels: c_int);
            0x129b @2000 hand fn cuTexRefSetAddressMode(reference: Handle, dimension: c_int, mode: c_uint);
            0x129c @2000 hand fn cuTexRefSetFilterMode(reference: Handle, mode: c_uint);
            0x129d @5000 hand fn cuTexRefSetMipmapFilterMode(reference: Handle, mode: c_uint);
            0x129e @5000 hand fn cuTexRefSetMipmapLevelBias(reference: Handle, bias: f32);
            0x129f @5000 hand fn cuTexRefSetMipmapLevelClamp(reference: Handle, least: f32, most: f32);
            0x12a0 @5000 hand fn cuTexRefSetMaxAnisotropy(reference: Handle, most: c_uint);
            0x12a1 @8000 hand fn cuTexRefSetBorderColor(reference: Handle, color: *const f32);
            0x12a2 @2000 hand fn cuTexRefSetFlags(reference: Handle, flags: c_uint);
            0x12a3 @3020 hand fn cuTexRefGetAddress_v2(address: *mut u64, reference: Handle);
            0x12a4 @2000 hand fn cuTexRefGetArray(array: *mut Handle, reference: Handle);
            0x12a5 @5000 hand fn cuTexRefGetMipmappedArray(array: *mut Handle, reference: Handle);
            0x12a6 @2000 hand fn cuTexRefGetAddressMode(mode: *mut c_uint, reference: Handle, dimension: c_int);
            0x12a7 @2000 hand fn cuTexRefGetFilterMode(mode: *mut c_uint, reference: Handle);
            0x12a8 @2000 hand fn cuTexRefGetFormat(format: *mut c_uint, channels: *mut c_int, reference: Handle);
            0x12a9 @5000 hand fn cuTexRefGetMipmapFilterMode(mode: *mut c_uint, reference: Handle);
            0x12aa @5000 hand fn cuTexRefGetMipmapLevelBias(bias: *mut f32, reference: Handle);
            0x12ab @5000 hand fn cuTexRefGetMipmapLevelClamp(least: *mut f32, most: *mut f32, reference: Handle);
            0x12ac @5000 hand fn cuTexRefGetMaxAnisotropy(most: *mut c_int, reference: Handle);
            0x12ad @8000 hand fn cuTexRefGetBorderColor(color: *mut f32, reference: Handle);
            0x12ae @2000 hand fn cuTexRefGetFlags(flags: *mut c_uint, reference: Handle);
            0x12af @3000 scalar fn cuSurfRefSetArray(reference: Handle, array: Handle, flags: c_uint);
            0x12b0 @3000 hand fn cuSurfRefGetArray(array: *mut Handle, reference: Handle);

            // values in memory
            0x1430 @8000 hand fn cuStreamWaitValue32(h_stream: Handle, addr: u64, value: c_uint, flags: c_uint) also cuStreamWaitValue32_ptsz;
            0x1431 @11070 hand fn cuStreamWaitValue32_v2(h_stream: Handle, addr: u64, value: c_uint, flags: c_uint) also cuStreamWaitValue32_v2_ptsz;
            0x1432 @9000 hand fn cuStreamWaitValue64(h_stream: Handle, addr: u64, value: u64, flags: c_uint) also cuStreamWaitValue64_ptsz;
            0x1433 @11070 hand fn cuStreamWaitValue64_v2(h_stream: Handle, addr: u64, value: u64, flags: c_uint) also cuStreamWaitValue64_v2_ptsz;
            0x1434 @8000 hand fn cuStreamWriteValue32(h_stream: Handle, addr: u64, value: c_uint, flags: c_uint) also cuStreamWriteValue32_ptsz;
            0x1435 @9000 hand fn cuStreamWriteValue64(h_stream: Handle, addr: u64, value: u64, flags: c_uint) also cuStreamWriteValue64_ptsz;
            0x1436 @8000 hand fn cuStreamBatchMemOp(h_stream: Handle, count: c_uint, params: *const c_void, flags: c_uint) also cuStreamBatchMemOp_ptsz;
            0x1437 @11070 hand fn cuStreamBatchMemOp_v2(h_stream: Handle, count: c_uint, params: *const c_void, flags: c_uint) also cuStreamBatchMemOp_v2_ptsz;

            // events of contexts
            0x1438 @12050 scalar fn cuCtxRecordEvent(h_ctx: Handle, h_event: Handle);
            0x1439 @12050 hand fn cuCtxWaitEvent(h_ctx: Handle, h_event: Handle);

            // peers and places of memory
            0x143a @4000 scalar fn cuCtxEnablePeerAccess(peer_context: Handle, flags: c_uint);
            0x143b @4000 scalar fn cuCtxDisablePeerAccess(peer_context: Handle);
            0x143c @13040 local fn cuMemGetLocationInfo(ptr: u64, size: usize, summary_granularity: usize, sampling_granularity: usize, location_out: *mut c_void);
            0x143d @13050 hand fn cuTensorMapSetAllocationClass(tensor_map: *mut c_void, alloc_class: c_uint, out_alloc_class: *mut c_uint);

            // events of other processes
            0x143e @4010 hand fn cuIpcGetEventHandle(p_handle: *mut c_void, event: Handle);
            0x143f @4010 hand fn cuIpcOpenEventHandle(ph_event: *mut Handle, handle: IpcHandle);

            // pools of other processes
            0x1440 @11020 hand fn cuMemPoolExportToShareableHandle(handle_out: *mut c_void, pool: Handle, handle_type: c_uint, flags: u64);
            0x1441 @11020 hand fn cuMemPoolImportFromShareableHandle(pool_out: *mut Handle, handle: *mut c_void, handle_type: c_uint, flags: u64);
            0x1442 @11020 hand fn cuMemPoolExportPointer(share_data_out: *mut c_void, ptr: u64);
            0x1443 @11020 hand fn cuMemPoolImportPointer(ptr_out: *mut u64, pool: Handle, share_data: *const c_void);

            // resources of devices, and green contexts
            0x1460 @12040 hand fn cuDeviceGetDevResource(device: c_int, resource: *mut c_void, kind: c_uint);
            0x1461 @12040 hand fn cuCtxGetDevResource(h_ctx: Handle, resource: *mut c_void, kind: c_uint);
            0x1462 @12040 hand fn cuGreenCtxGetDevResource(h_ctx: Handle, resource: *mut c_void, kind: c_uint);
            0x1463 @13010 hand fn cuStreamGetDevResource(h_stream: Handle, resource: *mut c_void, kind: c_uint) also cuStreamGetDevResource_ptsz;
            0x1464 @12040 hand fn cuDevSmResourceSplitByCount(result: *mut c_void, nb_groups: *mut c_uint, input: *const c_void, remainder: *mut c_void, flags: c_uint, min_count: c_uint);
            0x1465 @13010 hand fn cuDevSmResourceSplit(result: *mut c_void, nb_groups: c_uint, input: *const c_void, remainder: *mut c_void, flags: c_uint, group_params: *mut c_void);
            0x1466 @12040 hand fn cuDevResourceGenerateDesc(ph_desc: *mut Handle, resources: *mut c_void, nb_resources: c_uint);
            0x1467 @12040 scalar fn cuGreenCtxCreate(ph_ctx: *mut Handle, desc: Handle, dev: c_int, flags: c_uint);
            0x1468 @12040 scalar fn cuGreenCtxDestroy(h_ctx: Handle);
            0x1469 @12040 local fn cuCtxFromGreenCtx(p_context: *mut Handle, h_ctx: Handle);
            0x146a @12050 scalar fn cuGreenCtxStreamCreate(ph_stream: *mut Handle, green_ctx: Handle, flags: c_uint, priority: c_int);
            0x146b @12040 hand fn cuGreenCtxRecordEvent(h_ctx: Handle, h_event: Handle);
            0x146c @12040 hand fn cuGreenCtxWaitEvent(h_ctx: Handle, h_event: Handle);
            0x146d @12040 local fn cuStreamGetGreenCtx(h_stream: Handle, ph_ctx: *mut Handle);
            0x146e @12090 local fn cuGreenCtxGetId(green_ctx: Handle, green_ctx_id: *mut u64);
        }
    };
}

/// `CUipcMemHandle`, which C passes by value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct IpcHandle(pub [u8; 64]);

/// A parameter or result of a wire call, for documentation and fuzz seeds.
#[derive(Clone, Copy, Debug)]
pub struct Parameter {
    /// Its name.
    pub name: &'static str,
    /// Its kind, as written in the table.
    pub kind: &'static str,
}

/// A row of the wire table.
#[derive(Clone, Copy, Debug)]
pub struct WireRow {
    /// Stable id.
    pub id: u16,
    /// Name.
    pub name: &'static str,
    /// `post`, `work`, `sync` or `wait`.
    pub class: &'static str,
    /// The section: the thread of the worker that serves it.
    pub thread: &'static str,
    /// The parameters that the guest sends.
    pub parameters: &'static [Parameter],
    /// The results that the answer carries.
    pub results: &'static [Parameter],
    /// The row's documentation, a line each.
    pub doc: &'static [&'static str],
}

/// A row of the table of C functions.
#[derive(Clone, Copy, Debug)]
pub struct CRow {
    /// Stable id.
    pub id: u16,
    /// CUDA version in which the symbol appeared (11040 = 11.4).
    pub since: u32,
    /// `local`, `hand`, `scalar`, `forward`, `contextless` or `driver`.
    pub class: &'static str,
    /// The exported symbol.
    pub name: &'static str,
    /// Symbols of the same function whose default stream is the calling thread's.
    pub per_thread: &'static [&'static str],
    /// The wire call that a `forward` or `contextless` function makes.
    pub call: &'static [&'static str],
}

/// The outcome of a call in its handler.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Outcome<R> {
    /// Done, with this answer if one is due.
    Done(R),
    /// Failed with this CUresult.
    Failed(u32),
    /// Taken over by another thread, which will answer.
    Later,
}

/// The work that [`dispatch`] leaves to its caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dispatched {
    /// Done; this many bytes of answer were written.
    Done(usize),
    /// Failed with this CUresult.
    Failed(u32),
    /// Another thread answers.
    Later,
}

/// The reason for which a record is refused; the session ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// No row has this id.
    #[error("no call has id {0:#06x}")]
    Unknown(u16),
    /// The fields do not decode.
    #[error("call {call:#06x}: {error}")]
    Field {
        /// The call's id.
        call: u16,
        /// The error of the decoding.
        error: FieldError,
    },
}

/// A request of the guest: the decoded or still to be encoded arguments of one wire call.
pub trait Request {
    /// The call's id.
    const CALL: u16;
    /// The results.
    type Reply;
    /// Appends the arguments.
    ///
    /// # Errors
    /// [`FieldError`] when one is out of range or the record is full.
    fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError>;
    /// Decodes the results.
    ///
    /// # Errors
    /// [`FieldError`] when the bytes are not these results.
    fn reply(fields: &[u8]) -> Result<Self::Reply, FieldError>;
}

/// A request that has an answer.
pub trait Answered: Request {}

/// A request that needs no answer.
pub trait Posted: Request {
    /// True if the guest waits for its end at once when launches block. The end of any other post may need an act of another thread.
    const BLOCKS: bool;
}

/// Implements the trait of a row's class.
macro_rules! class {
    (post ($($life:lifetime)?)) => { impl$(<$life>)? Posted for Args$(<$life>)? { const BLOCKS: bool = false; } };
    (work ($($life:lifetime)?)) => { impl$(<$life>)? Posted for Args$(<$life>)? { const BLOCKS: bool = true; } };
    ($answered:ident ($($life:lifetime)?)) => { impl$(<$life>)? Answered for Args$(<$life>)? {} };
}

macro_rules! wire {
    ($($thread:ident { $($(#[doc = $doc:literal])* $id:literal $class:ident $name:ident $(<$life:lifetime>)?
        ($($p:ident: $ty:ty),*) -> ($($r:ident: $rty:ty),*);)+ })+) => {
        /// One module per wire call: its id, its arguments, its results.
        pub mod wire {
            $($(
                $(#[doc = $doc])*
                pub mod $name {
                    #[allow(clippy::wildcard_imports, reason = "the kinds of the table, in one list above")]
                    use super::super::*;

                    /// The call's id.
                    pub const CALL: u16 = $id;

                    /// The arguments.
                    #[derive(Clone, Copy, Debug, PartialEq)]
                    pub struct Args$(<$life>)? {
                        $(#[doc = concat!("Parameter `", stringify!($p), "`.")] pub $p: $ty,)*
                    }

                    /// The results.
                    #[derive(Clone, Copy, Debug, PartialEq)]
                    pub struct Reply {
                        $(#[doc = concat!("Result `", stringify!($r), "`.")] pub $r: $rty,)*
                    }

                    impl$(<$life>)? Request for Args$(<$life>)? {
                        const CALL: u16 = $id;
                        type Reply = Reply;
                        fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
                            Args::put(self, writer)
                        }
                        fn reply(fields: &[u8]) -> Result<Reply, FieldError> {
                            Reply::get(fields)
                        }
                    }
                    class!($class ($($life)?));

                    impl$(<$life>)? Args$(<$life>)? {
                        /// Appends the arguments.
                        ///
                        /// # Errors
                        /// [`FieldError`] when one is out of range or the record is full.
                        pub fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
                            let _ = &writer;
                            $(Field::put(&self.$p, writer)?;)*
                            Ok(())
                        }

                        /// Decodes the arguments, all of them and nothing more.
                        ///
                        /// # Errors
                        /// [`FieldError`] when the bytes are not these arguments.
                        pub fn get(fields: &$($life)? [u8]) -> Result<Self, FieldError> {
                            #[allow(unused_mut, reason = "a row may have no parameters")]
                            let mut reader = Reader::new(fields);
                            let args = Args { $($p: Field::get(&mut reader)?,)* };
                            reader.finish()?;
                            Ok(args)
                        }
                    }

                    impl Reply {
                        /// Appends the results.
                        ///
                        /// # Errors
                        /// [`FieldError::Long`] when they do not fit.
                        pub fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
                            let _ = &writer;
                            $(Field::put(&self.$r, writer)?;)*
                            Ok(())
                        }

                        /// Decodes the results, all of them and nothing more.
                        ///
                        /// # Errors
                        /// [`FieldError`] when the bytes are not these results.
                        pub fn get(fields: &[u8]) -> Result<Reply, FieldError> {
                            #[allow(unused_mut, reason = "a row may have no results")]
                            let mut reader = Reader::new(fields);
                            let reply = Reply { $($r: Field::get(&mut reader)?,)* };
                            reader.finish()?;
                            Ok(reply)
                        }
                    }
                }
            )+)+
        }

        /// Every wire call, in the order of the table.
        pub const WIRE: &[WireRow] = &[$($(WireRow {
            id: $id,
            name: stringify!($name),
            class: stringify!($class),
            thread: stringify!($thread),
            parameters: &[$(Parameter { name: stringify!($p), kind: stringify!($ty) }),*],
            results: &[$(Parameter { name: stringify!($r), kind: stringify!($rty) }),*],
            doc: &[$($doc),*],
        }),+),+];

        /// The host's side: one method per wire call, arguments decoded. The methods must not wait for the GPU.
        pub trait Handler {
            $($(
                $(#[doc = $doc])*
                fn $name$(<$life>)?(&mut self, header: &Header, args: wire::$name::Args$(<$life>)?)
                    -> Outcome<wire::$name::Reply>;
            )+)+
        }

        /// Decodes one call and hands it to its method. The answer's fields go to `answer`.
        ///
        /// # Errors
        /// [`CallError`] when the record is not a call of the table.
        pub fn dispatch(
            handler: &mut impl Handler,
            header: &Header,
            fields: &[u8],
            answer: &mut [u8; limits::REPLY_BYTES],
        ) -> Result<Dispatched, CallError> {
            let wrong = |error| CallError::Field { call: header.call, error };
            match header.call {
                $($($id => {
                    let args = wire::$name::Args::get(fields).map_err(wrong)?;
                    match handler.$name(header, args) {
                        Outcome::Done(reply) => {
                            let mut writer = Writer::new(answer);
                            reply.put(&mut writer).map_err(wrong)?;
                            Ok(Dispatched::Done(writer.length()))
                        }
                        Outcome::Failed(error) => Ok(Dispatched::Failed(error)),
                        Outcome::Later => Ok(Dispatched::Later),
                    }
                })+)+
                other => Err(CallError::Unknown(other)),
            }
        }

        /// The arena memory that a call reads and writes; none for an id that is not in the table.
        ///
        /// # Errors
        /// [`FieldError`] when its fields cannot be read, or the memory is not one range.
        pub fn staged<'a>(call: u16, fields: &'a [u8]) -> Result<Staged, FieldError> {
            let mut staged = Staged::default();
            match call {
                $($($id if const { false $(|| <$ty as Field>::STAGED)* } => {
                    let args = wire::$name::Args::get(fields)?;
                    let _ = &args;
                    $(args.$p.stage(&mut staged)?;)*
                })+)+
                _ => {}
            }
            Ok(staged)
        }
    };
}
for_each_wire_call!(wire);

macro_rules! rows {
    ($($(#[doc = $doc:literal])* $id:literal @ $since:literal $class:ident fn $name:ident($($p:ident: $ty:ty),*)
        $(also $($also:ident),+)? $(=> $wire:ident($($to:ident: $from:tt),*) -> ($($result:ident: $into:ident),*))?;)+) => {
        /// Every listed C function, ascending by id.
        pub const C: &[CRow] = &[$(CRow {
            id: $id,
            since: $since,
            class: stringify!($class),
            name: stringify!($name),
            per_thread: &[$($(stringify!($also)),+)?],
            call: &[$(stringify!($wire))?],
        }),+];
    };
}
for_each_c_call!(rows);

/// Values of `CUdevice_attribute` 0 … [`limits::DEVICE_ATTRIBUTES`] as the guest sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes(pub [i32; limits::DEVICE_ATTRIBUTES]);

/// Values of `CUfunction_attribute` 0 … 15, then the bytes of all parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FunctionAttributes(pub [i32; 17]);

fn put_packed(values: &[i32], writer: &mut Writer<'_>) -> Result<(), FieldError> {
    values.chunks(2).try_for_each(|pair| {
        let half = |i: usize| u64::from(pair.get(i).copied().unwrap_or(0).cast_unsigned());
        writer.word(half(0) | half(1) << 32)
    })
}

#[expect(clippy::cast_possible_truncation, reason = "halves of a word")]
fn get_packed<const N: usize>(reader: &mut Reader<'_>) -> Result<[i32; N], FieldError> {
    let mut values = [0; N];
    for pair in values.chunks_mut(2) {
        let word = reader.word()?;
        for (value, half) in pair.iter_mut().zip([word as u32, (word >> 32) as u32]) {
            *value = half.cast_signed();
        }
    }
    Ok(values)
}

impl<'a> Field<'a> for Attributes {
    fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
        put_packed(&self.0, writer)
    }
    fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
        get_packed(reader).map(Attributes)
    }
}

impl<'a> Field<'a> for FunctionAttributes {
    fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
        put_packed(&self.0, writer)
    }
    fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
        get_packed(reader).map(FunctionAttributes)
    }
}

/// Offset and size of each parameter of a kernel, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameters {
    count: usize,
    entries: [(u16, u16); limits::PARAMETERS],
}

impl Parameters {
    /// No parameters.
    pub const NONE: Parameters = Parameters { count: 0, entries: [(0, 0); limits::PARAMETERS] };

    /// Appends a parameter.
    ///
    /// # Errors
    /// [`FieldError::Long`] when there are [`limits::PARAMETERS`] already or a number does not fit 16 bits.
    pub fn push(&mut self, offset: usize, size: usize) -> Result<(), FieldError> {
        let entry = self.entries.get_mut(self.count).ok_or(FieldError::Long)?;
        let narrow = |value| u16::try_from(value).map_err(|_| FieldError::Long);
        *entry = (narrow(offset)?, narrow(size)?);
        self.count = self.count.saturating_add(1);
        Ok(())
    }

    /// The parameters as (offset, size).
    #[must_use]
    pub fn entries(&self) -> &[(u16, u16)] {
        self.entries.get(..self.count).unwrap_or_default()
    }
}

impl<'a> Field<'a> for Parameters {
    fn put(&self, writer: &mut Writer<'_>) -> Result<(), FieldError> {
        writer.word(self.count as u64)?;
        self.entries().chunks(2).try_for_each(|pair| {
            let half = |i: usize| {
                pair.get(i).map_or(0, |(offset, size)| u64::from(*offset) | u64::from(*size) << 16)
            };
            writer.word(half(0) | half(1) << 32)
        })
    }

    #[expect(clippy::cast_possible_truncation, reason = "quarters of a word")]
    fn get(reader: &mut Reader<'a>) -> Result<Self, FieldError> {
        let count = usize::try_from(reader.word()?).map_err(|_| FieldError::Range)?;
        let mut parameters = Parameters::NONE;
        for pair in parameters.entries.get_mut(..count).ok_or(FieldError::Range)?.chunks_mut(2) {
            let word = reader.word()?;
            for (entry, half) in pair.iter_mut().zip([word as u32, (word >> 32) as u32]) {
                *entry = (half as u16, (half >> 16) as u16);
            }
        }
        parameters.count = count;
        Ok(parameters)
    }
}
