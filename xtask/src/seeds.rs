//! Seeds for fuzzing: valid inputs of each target, made from the call table and the test data. In one file: the list of all targets.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use sluice_protocol::calls::{VERSION, WIRE, WireRow, wire};
use sluice_protocol::doorbell::{Capset, Doorbell};
use sluice_protocol::field::{
    AccessFlags, ArenaIn, ArenaOut, ArenaRowsIn, ArenaRowsOut, ArenaText, Bytes, CarriedOptions,
    DeviceAddress, ElementSize, FieldError, LaunchAttributes, Mint, Name, Ordinal, ParameterBytes, Size,
    Take, Writer,
};
use sluice_protocol::gpu::{PAGE, Purpose, command};
use sluice_protocol::graph::{
    Change, Conditional, ConditionalHead, Copy, CopyEnd, Dependency, Fill, Host, Kernel, PlanWriter,
    Selection, Side, WirePlan, WireWork, Write, Writes,
};
#[allow(clippy::wildcard_imports, reason = "the kinds of objects, in one list")]
use sluice_protocol::handle::*;
use sluice_protocol::image::{ImageResource, ImageView, LinearImage, Sampling};
use sluice_protocol::record::{Header, NO_REPLY};
use sluice_protocol::resources::ResourceBytes;
use sluice_protocol::stream::{FromGuest, ToGuest};
use sluice_protocol::{limits, session};
use sluice_tests::paths;

/// An input and its name.
type Seed = (String, Vec<u8>);

/// Writes the seeds of a target; none for a target that has no special form.
pub(crate) fn write(target: &str, folder: &Path) -> Result<()> {
    let seeds = match target {
        "records" => records()?,
        "session_page" => session_page()?,
        "graphs" => graphs()?,
        "guest_library" => guest_library(),
        "device_messages" => device_messages()?,
        "gpu_commands" => gpu_commands(),
        "streams" => streams()?,
        "ptx" => ptx()?,
        "fatbin" => fatbin(),
        _ => return Ok(()),
    };
    fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
    for (name, bytes) in seeds {
        let path = folder.join(name);
        fs::write(&path, bytes).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

// ---- ring records ----

/// One seed per row, with and without a reply, and one with every row.
fn records() -> Result<Vec<Seed>> {
    let mut seeds = Vec::new();
    let mut all = vec![0; 8];
    for row in WIRE {
        let asked = record(row, 1)?;
        seeds.push((row.name.to_owned(), [&[0; 8][..], &asked].concat()));
        seeds.push((format!("{}-posted", row.name), [&[0; 8][..], &record(row, NO_REPLY)?].concat()));
        all.extend(asked);
    }
    seeds.push(("all".to_owned(), all));
    seeds.extend(images()?);
    // No row's seed has a narrow value.
    let narrow = |w: &mut Writer<'_>| {
        let at = DeviceAddress(MEMORY);
        wire::stream_wait_value::Args { at, value: 1, wide: false, comparison: 0 }.put(w)
    };
    let wait = built(wire::stream_wait_value::CALL, NO_REPLY, narrow)?;
    seeds.push(("stream_wait_value-narrow".to_owned(), [&[0; 8][..], &wait].concat()));
    Ok(seeds)
}

/// Textures over each kind of memory, and copies from and to a level of a mipmapped array.
fn images() -> Result<Vec<Seed>> {
    let linear = LinearImage { address: MEMORY, format: 0x20, channels: 1, length: 64 };
    let memories = [
        ("nothing", ImageResource::Nothing),
        ("array", ImageResource::Array(Id::new(0, 1))),
        ("mipmapped", ImageResource::Mipmapped(Id::new(0, 1))),
        ("linear", ImageResource::Linear(linear)),
        ("pitched", ImageResource::Pitched { memory: linear, height: 2, pitch: 256 }),
    ];
    let mut seeds = Vec::new();
    for (name, resource) in memories {
        let (sampling, view) = (Sampling::default(), ImageView(None));
        let texture = built(wire::texture_create::CALL, 1, |w| {
            wire::texture_create::Args { resource, sampling, view }.put(w)
        })?;
        let reference = built(wire::texture_reference::CALL, 1, |w| {
            let reference = Mint(Id::new(0, 1));
            wire::texture_reference::Args { module: Id::new(0, 1), name: Name(b"texture"), reference }.put(w)
        })?;
        let bound = built(wire::texture_reference_set::CALL, 1, |w| {
            wire::texture_reference_set::Args { reference: Id::new(0, 1), resource, sampling }.put(w)
        })?;
        let records = [&[0; 8][..], &texture, &reference, &bound].concat();
        seeds.push((format!("texture-over-{name}"), records));
    }
    // Objects by the numbers that they get: each is destroyed, and the first again when it has gone.
    let of_array = ImageResource::Array(Id::new(0, 1));
    let (sampling, view) = (Sampling::default(), ImageView(None));
    let living = [
        built(wire::texture_create::CALL, 1, |w| {
            wire::texture_create::Args { resource: of_array, sampling, view }.put(w)
        })?,
        built(wire::surface_create::CALL, 1, |w| wire::surface_create::Args { array: Id::new(0, 1) }.put(w))?,
        built(wire::texture_destroy::CALL, 1, |w| wire::texture_destroy::Args { texture: 1 }.put(w))?,
        built(wire::surface_destroy::CALL, 1, |w| wire::surface_destroy::Args { surface: 2 }.put(w))?,
        built(wire::texture_destroy::CALL, 1, |w| wire::texture_destroy::Args { texture: 1 }.put(w))?,
    ];
    seeds.push(("objects-by-number".to_owned(), [&[0; 8][..], &living.concat()].concat()));
    let level = built(wire::mipmapped_array_level::CALL, 1, |w| {
        wire::mipmapped_array_level::Args { whole: Id::new(0, 1), level: 1, array: Mint(Id::new(1, 1)) }
            .put(w)
    })?;
    let (at, extent) = ([0; 3], [32, 4, 1]);
    let to_level = built(wire::memcpy_atoa::CALL, NO_REPLY, |w| {
        let (to, from) = (Id::new(1, 1), Id::new(0, 1));
        wire::memcpy_atoa::Args { to, to_at: at, from, from_at: at, extent }.put(w)
    })?;
    let from_level = built(wire::memcpy_atoh::CALL, NO_REPLY, |w| {
        let to = ArenaRowsOut { address: MEMORY, pitch: 32, width: 32, height: 4 };
        wire::memcpy_atoh::Args { to, from: Id::new(1, 1), at }.put(w)
    })?;
    let ended = built(wire::mipmapped_array_destroy::CALL, 1, |w| {
        wire::mipmapped_array_destroy::Args { array: Take(Id::new(0, 1)) }.put(w)
    })?;
    let records = [&[0; 8][..], &level, &to_level, &from_level, &ended].concat();
    seeds.push(("level-copies".to_owned(), records));
    Ok(seeds)
}

/// Every record, with different stores of the guest meanwhile: none, to the tail, to the records, and to the arena.
fn session_page() -> Result<Vec<Seed>> {
    let mut records = Vec::new();
    for row in WIRE {
        records.extend(record(row, 1)?);
    }
    let stores: [(&str, &[[u8; 5]]); 4] = [
        ("still", &[]),
        ("tail", &[[0, 0, 0, 8, 0], [4, 0, 0, 255, 255], [3, 0, 0, 7, 0]]),
        ("records", &[[24, 0, 0, 8, 0], [25, 5, 0, 64, 0], [28, 12, 0, 255, 1]]),
        ("arena", &[[56, 0, 0, 1, 2], [57, 9, 0, 3, 4], [60, 0, 0, 0, 0]]),
    ];
    let seed = |stores: &[[u8; 5]]| -> Result<Vec<u8>> {
        let count = u8::try_from(stores.len()).context("few stores")?;
        Ok([&[count][..], &stores.concat(), &records].concat())
    };
    stores.into_iter().map(|(name, stores)| Ok((name.to_owned(), seed(stores)?))).collect()
}

/// A parameter kind as the target's session can serve it: its context, library and function are the first of their kind.
trait Sample {
    /// A value for the parameter of this name.
    fn sample(name: &str) -> Self;
}

macro_rules! seeds {
    ($($ty:ty: |$name:ident| $value:expr;)+) => {$(
        impl Sample for $ty {
            fn sample($name: &str) -> Self {
                $value
            }
        }
    )+};
}

/// The arena of the target's session, and its window.
const MEMORY: u64 = limits::WINDOW_BOUNDS.start;

seeds! {
    bool: |_name| true;
    u32: |name| match name {
        "version" => VERSION,
        "channels" | "levels" => 1,
        "format" => 0x20,
        "slot" | "stream" => 1,
        "limit" => 64,
        _ => 0,
    };
    i32: |name| if matches!(name, "block" | "limit") { 64 } else { 0 };
    u64: |name| match name {
        "base" => MEMORY + (1 << 39),
        "height" => 1,
        "to_rows" | "from_rows" => 1,
        "width" | "bytes" | "to_pitch" | "from_pitch" | "pitch" => 64,
        _ => 0,
    };
    u128: |_name| 0;
    [u32; 3]: |_name| [1; 3];
    [u64; 8]: |_name| [0; 8];
    [u8; 128]: |_name| [0; 128];
    [u32; 5]: |_name| [1; 5];
    [u64; 5]: |_name| [16; 5];
    [u64; 3]: |_name| [16, 1, 1];
    ImageResource: |_name| ImageResource::Linear(LinearImage { address: MEMORY, format: 0x20, channels: 1, length: 64 });
    Sampling: |_name| Sampling::default();
    ImageView: |_name| ImageView(None);
    Ordinal: |_name| Ordinal(0);
    AccessFlags: |_name| AccessFlags::ReadWrite;
    ElementSize: |_name| ElementSize::Byte;
    DeviceAddress: |_name| DeviceAddress(MEMORY);
    ArenaRowsIn: |_name| ArenaRowsIn { address: MEMORY, pitch: 64, width: 64, height: 1 };
    ArenaRowsOut: |_name| ArenaRowsOut { address: MEMORY, pitch: 64, width: 64, height: 1 };
    // A level of optimisation.
    CarriedOptions<'_>: |_name| CarriedOptions::new(&[7, 0, 0, 0, 3, 0, 0, 0]).unwrap_or(CarriedOptions::NONE);
    LaunchAttributes<'_>: |_name| LaunchAttributes(&[]);
    ParameterBytes<'_>: |_name| Bytes(&[0; 8]);
    // All multiprocessors of the first device: an origin of five words of 0, and no more.
    ResourceBytes<'_>: |_name| Bytes(&[0; 40]);
    Name<'_>: |_name| Name(b"work_p1");
}

impl<const LIMIT: u64> Sample for Size<LIMIT> {
    fn sample(_: &str) -> Self {
        Size(64)
    }
}

macro_rules! ranges {
    ($($range:ident),+) => {$(
        impl<const LIMIT: u64> Sample for $range<LIMIT> {
            fn sample(name: &str) -> Self {
                // A report has room for its logs.
                $range { address: MEMORY, bytes: if name == "report" { 256 } else { 64 } }
            }
        }
    )+};
}
ranges!(ArenaIn, ArenaOut, ArenaText);

impl<K: Kind> Sample for Id<K> {
    fn sample(_: &str) -> Self {
        Id::new(0, 1)
    }
}

impl<K: Kind> Sample for Take<K> {
    fn sample(_: &str) -> Self {
        Take(Id::new(0, 1))
    }
}

impl<K: Kind> Sample for Mint<K> {
    fn sample(_: &str) -> Self {
        Mint(Id::new(1, 1))
    }
}

/// Defines the fields of a row's seed.
macro_rules! fields {
    ($($thread:ident { $($(#[doc = $doc:literal])* $id:literal $class:ident $name:ident $(<$life:lifetime>)?
        ($($p:ident: $ty:ty),*) -> ($($r:ident: $rty:ty),*);)+ })+) => {
        #[allow(clippy::extra_unused_lifetimes, reason = "the lifetime of the table's inline fields")]
        fn fields<'a>(call: u16, writer: &mut Writer<'_>) -> Result<(), FieldError> {
            match call {
                $($($id => wire::$name::Args { $($p: <$ty as Sample>::sample(stringify!($p))),* }.put(writer),)+)+
                _ => Err(FieldError::Range),
            }
        }
    };
}
sluice_protocol::for_each_wire_call!(fields);

fn record(row: &WireRow, reply: u32) -> Result<Vec<u8>> {
    built(row.id, reply, |writer| fields(row.id, writer))
}

/// A record of the first context and its default stream.
fn built(
    call: u16,
    reply: u32,
    put: impl FnOnce(&mut Writer<'_>) -> Result<(), FieldError>,
) -> Result<Vec<u8>> {
    let header = Header {
        call,
        reply,
        ticket: 1,
        context: Id::<Context>::new(0, 1).raw(),
        stream: 0,
        thread: 0,
        // Relative to the sequence that is due.
        sequence: 0,
    };
    let mut buffer = [0; limits::RECORD_BYTES];
    Ok(header.build(&mut buffer, put)?.to_vec())
}

// ---- plans of graphs ----

/// A plan with work of every kind that the target's session can do, one with an event, and a change.
fn graphs() -> Result<Vec<Seed>> {
    let end = |side| CopyEnd { side, address: MEMORY, pitch: 64, rows: 1, at: [0; 3] };
    let (context, function) = (Id::new(0, 1), Id::new(0, 1));
    let mut list = Vec::new();
    Writes::push(&mut list, Write { to: DeviceAddress(MEMORY), value: 1, wide: true })?;
    let works = [
        WireWork::Kernel(Kernel {
            function,
            context,
            grid: [1; 3],
            block: [1; 3],
            shared: 0,
            attributes: LaunchAttributes(&[]),
            parameters: Bytes(&[0; 8]),
        }),
        WireWork::Copy(Copy {
            context,
            to: end(Side::Device),
            from: end(Side::Arena),
            width: 64,
            height: 1,
            depth: 1,
        }),
        WireWork::Copy(Copy {
            context,
            to: CopyEnd {
                side: Side::Array,
                address: Id::<Array>::new(0, 1).raw(),
                pitch: 0,
                rows: 0,
                at: [0, 1, 1],
            },
            from: end(Side::Device),
            width: 64,
            height: 1,
            depth: 1,
        }),
        WireWork::Fill(Fill {
            context,
            to: DeviceAddress(MEMORY),
            pitch: 64,
            element: ElementSize::Word,
            value: 1,
            width: 16,
            height: 1,
        }),
        WireWork::Writes(Writes { context, list: Bytes(&list) }),
        WireWork::Empty,
    ];
    let plan = |works: &[WireWork<'_>]| -> Result<Vec<u8>> {
        let mut writer = PlanWriter::default();
        for (number, work) in (0_u32..).zip(works) {
            let before = number.checked_sub(1).map(|node| Dependency { node, edge: [0; 3] });
            writer.node(number, true, before.into_iter(), work)?;
        }
        Ok(writer.finish()?)
    };
    let inner = plan(&works)?;
    let nested = [&works[..], &[WireWork::Child(WirePlan::new(&inner)?)]].concat();
    // The target makes this graph before each input, and puts its handle in the place of this number.
    let (graph, handle) = (Id::new(0, 1), 0x6a6e_1e5e_ed00_0001);
    let mut bodies = Vec::new();
    for body in [&works[..1], &works[3..4]] {
        Conditional::push(&mut bodies, &plan(body)?);
    }
    let head = ConditionalHead { context, graph, handle, selection: Selection::Switch, count: 2 };
    let conditional = [WireWork::Conditional(Conditional::new(head, &bodies))];
    let refused = [
        WireWork::EventWait(Id::new(0, 1)),
        WireWork::EventRecord(Id::new(0, 1)),
        WireWork::Host(Host { token: 7 }),
    ];
    Ok(vec![
        ("nested".to_owned(), plan(&nested)?),
        ("refused".to_owned(), plan(&refused)?),
        ("conditional".to_owned(), plan(&conditional)?),
        ("change".to_owned(), Change::encode(&[2], false, &works[2])?),
    ])
}

// ---- virtio-gpu commands ----

/// Address of the control page of the target's guest.
const PAGES: u32 = 0x20_0000;

fn gpu_command(kind: u32, context: u32, words: &[u32]) -> Vec<u8> {
    let header = [kind, 0, 0, 0, context, 0];
    header.iter().chain(words).flat_map(|word| word.to_le_bytes()).collect()
}

fn submit(doorbell: Doorbell) -> Vec<u8> {
    let mut bytes = gpu_command(command::SUBMIT_3D, 1, &[32, 0]);
    // Fenced, on ring 1.
    bytes[4] = 3;
    bytes[20] = 1;
    bytes.extend(doorbell.encode());
    bytes
}

/// The life of a guest over a stream: a session, an arena, its memory, and every record.
fn streams() -> Result<Vec<Seed>> {
    const ARENA: u64 = limits::WINDOW_BOUNDS.start;
    let begin = [
        FromGuest::Create { resource: 1, bytes: session::BYTES as u64 },
        FromGuest::Open { resource: 1 },
        FromGuest::Create { resource: 2, bytes: 1 << 20 },
        FromGuest::Attach { resource: 2, slot: 1, address: ARENA },
        FromGuest::Bulk { address: ARENA + 100, bytes: 64 },
    ];
    let end = [FromGuest::Detach { slot: 1 }, FromGuest::Destroy { resource: 2 }, FromGuest::Close];
    let mut life = vec![255];
    life.extend(begin.iter().flat_map(|frame| frame.encode()));
    life.extend([7; 64]);
    for row in WIRE {
        let record = record(row, NO_REPLY)?;
        let bytes = u32::try_from(record.len()).context("a short record")?;
        life.extend(FromGuest::Record { bytes }.encode());
        life.extend(record);
    }
    life.extend(end.iter().flat_map(|frame| frame.encode()));
    Ok(vec![("life".to_owned(), life)])
}

fn gpu_commands() -> Vec<Seed> {
    use command::*;
    #[expect(clippy::cast_possible_truncation, reason = "a page and a session's page")]
    let (page, control) = (PAGE as u32, session::BYTES as u32);
    let blob =
        |id, at, bytes| gpu_command(RESOURCE_CREATE_BLOB, 0, &[id, 1, 1, 1, 0, 0, 0, 0, at, 0, bytes, 0]);
    let arena = PAGES + 0x20_0000;
    let create: Vec<u32> = [3, Capset::ID].into_iter().chain([0; 16]).collect();
    let commands = [
        ("get_display_info", gpu_command(GET_DISPLAY_INFO, 0, &[])),
        ("get_capset_info", gpu_command(GET_CAPSET_INFO, 0, &[0, 0])),
        ("get_capset", gpu_command(GET_CAPSET, 0, &[Capset::ID, 0])),
        ("ctx_create", gpu_command(CTX_CREATE, 1, &create)),
        ("create_blob", blob(1, PAGES, control)),
        ("ctx_attach", gpu_command(CTX_ATTACH_RESOURCE, 1, &[1, 0])),
        ("open", submit(Doorbell::Open { resource: 1 })),
        ("create_3d", gpu_command(RESOURCE_CREATE_3D, 1, &[2, 0, 64, 1 << 17, page, 1, 1, 1, 0, 0, 0, 0])),
        (
            "attach_backing",
            gpu_command(ATTACH_BACKING, 0, &[2, 2, arena, 0, page, 0, arena + 2 * page, 0, page, 0]),
        ),
        ("ctx_attach_arena", gpu_command(CTX_ATTACH_RESOURCE, 1, &[2, 0])),
        ("attach", submit(Doorbell::Attach { resource: 2, slot: 1, address: limits::WINDOW_BOUNDS.start })),
        ("ring", submit(Doorbell::Ring)),
        ("wait", submit(Doorbell::Wait)),
        ("detach", submit(Doorbell::Detach { slot: 1 })),
        ("detach_backing", gpu_command(DETACH_BACKING, 0, &[2, 0])),
        ("unref", gpu_command(RESOURCE_UNREF, 0, &[2, 0])),
        ("ctx_detach", gpu_command(CTX_DETACH_RESOURCE, 1, &[1, 0])),
        ("close", submit(Doorbell::Close)),
        ("ctx_destroy", gpu_command(CTX_DESTROY, 1, &[])),
        ("create_2d", gpu_command(RESOURCE_CREATE_2D, 0, &[3, 1, 64, 64])),
        ("set_scanout", gpu_command(SET_SCANOUT, 0, &[0, 0, 64, 64, 0, 3])),
        ("flush", gpu_command(RESOURCE_FLUSH, 0, &[0, 0, 64, 64, 3, 0])),
        ("transfer", gpu_command(TRANSFER_TO_HOST_2D, 0, &[0, 0, 64, 64, 0, 0, 3, 0])),
    ];
    let mut seeds = lives("life", &[], &commands);
    // The target has it as sixteen bytes.
    let key = u64::from_le_bytes(*b"sixteen ");
    let create = |id: u32, purpose: Purpose| {
        gpu_command(RESOURCE_CREATE_2D, 0, &[&[id], &purpose.encode()[..]].concat())
    };
    let transfer = |doorbell: Doorbell| {
        let [x, y, width, height, offset] = doorbell.numbers().unwrap_or_default();
        gpu_command(TRANSFER_TO_HOST_2D, 0, &[x, y, width, height, offset, 0, 1, 0])
    };
    let mut token = create(3, Purpose::Token { key });
    token[4] = 1;
    let flat = [
        ("memory", create(1, Purpose::Memory)),
        ("backing", gpu_command(ATTACH_BACKING, 0, &[1, 1, PAGES, 0, control, 0])),
        ("open", transfer(Doorbell::Open { resource: 1 })),
        ("memory_arena", create(2, Purpose::Memory)),
        ("backing_arena", gpu_command(ATTACH_BACKING, 0, &[2, 1, arena, 0, page, 0])),
        ("attach", transfer(Doorbell::Attach { resource: 2, slot: 1, address: limits::WINDOW_BOUNDS.start })),
        ("ring", transfer(Doorbell::Ring)),
        ("wait", token),
        ("detach", transfer(Doorbell::Detach { slot: 1 })),
        ("unref", gpu_command(RESOURCE_UNREF, 0, &[2, 0])),
        ("unref_token", gpu_command(RESOURCE_UNREF, 0, &[3, 0])),
        ("close", transfer(Doorbell::Close)),
        ("unref_control", gpu_command(RESOURCE_UNREF, 0, &[1, 0])),
    ];
    // For a driver without contexts; the nonces have to be put back each time.
    seeds.extend(lives("flat_life", &[238, 240], &flat));
    seeds
}

/// Each command by itself, and all of them as the life of a session, after these operations.
fn lives(life_name: &str, before: &[u8], commands: &[(&str, Vec<u8>)]) -> Vec<Seed> {
    /// Operations of the target: a command, a worker for session 1, a message of worker 0, and events in between.
    fn put(into: &mut Vec<u8>, bytes: &[u8]) {
        into.push(0);
        into.extend(u16::try_from(bytes.len()).unwrap_or(0).to_le_bytes());
        into.extend(bytes);
    }
    let (worker, events) = ([193, 1], [255]);
    let said = |message: sluice_messages::control::FromWorker| {
        let mut operation = vec![209, 0];
        operation.extend(message.encode());
        operation
    };
    let mut life = before.to_vec();
    let mut seeds = Vec::new();
    for (name, bytes) in commands {
        put(&mut life, bytes);
        match *name {
            "open" => {
                life.extend(worker);
                life.extend(said(sluice_messages::control::FromWorker::Attached { slot: 0, error: 0 }));
            }
            "attach" => {
                life.extend(said(sluice_messages::control::FromWorker::Attached { slot: 1, error: 0 }));
            }
            // Wakes the waiter.
            "wait" => life.extend([224, 0]),
            "unref" => life.extend(said(sluice_messages::control::FromWorker::Detached { slot: 1 })),
            // The worker is gone.
            "close" => life.extend([232, 0]),
            _ => {}
        }
        life.extend(events);
        let mut one = before.to_vec();
        put(&mut one, bytes);
        let name = if before.is_empty() { (*name).to_owned() } else { format!("flat_{name}") };
        seeds.push((name, one));
    }
    seeds.push((life_name.to_owned(), life));
    seeds
}

// ---- messages ----

/// Each frame of a host, and all of them.
fn guest_library() -> Vec<Seed> {
    use sluice_protocol::session::{Attachment, HostCall, LateError};
    let payload = [1; 64];
    let frames = [
        ("state", ToGuest::State { state: session::READY, error: 0 }),
        ("sticky", ToGuest::Sticky { error: 700 }),
        ("room", ToGuest::Room { head: 64 }),
        ("console", ToGuest::Console { waiting: 1 }),
        ("adopted", ToGuest::Attachment { slot: 1, attachment: Attachment::Gathered(1 << 16) }),
        ("refused", ToGuest::Attachment { slot: 2, attachment: Attachment::Refused(2) }),
        ("sequence", ToGuest::Sequence { slot: 1, sequence: 7 }),
        ("reply", ToGuest::Reply { slot: 3, ticket: 1, result: 0, bytes: 64 }),
        ("late_error", ToGuest::LateError { index: 1, error: LateError { count: 1, code: 1 } }),
        ("host_call", ToGuest::HostCall { call: HostCall { number: 1, token: 0 } }),
        ("bulk", ToGuest::Bulk { address: 100, bytes: 64 }),
        ("lost", ToGuest::State { state: session::LOST, error: 46 }),
        // It crosses the end of the target's arena, so it is the last one that is read.
        ("bulk_beyond", ToGuest::Bulk { address: (64 << 10) - 32, bytes: 64 }),
    ];
    let mut all = vec![255, 0];
    let mut seeds = Vec::new();
    for (name, frame) in frames {
        let frame = [&frame.encode()[..], &payload[..frame.payload() as usize]].concat();
        seeds.push((name.to_owned(), [&[255, 0][..], &frame].concat()));
        all.extend(frame);
    }
    seeds.push(("all".to_owned(), all));
    seeds
}

/// Each number of each kind of message, and a setup.
fn device_messages() -> Result<Vec<Seed>> {
    use sluice_messages::control::{BYTES, WorkerSetup, codec};
    let mut seeds = Vec::new();
    for kind in 0..10_u8 {
        for tag in 1..16_u8 {
            let mut bytes = vec![0; 2 + BYTES];
            (bytes[0], bytes[1], bytes[2], bytes[10]) = (kind, tag % 5, tag, 1);
            seeds.push((format!("kind-{kind}-{tag}"), bytes));
        }
    }
    let worker = WorkerSetup {
        vm: 1,
        session: 2,
        driver: "/d.so".to_owned(),
        mapped_runs: 7,
        driver_queue: 1000,
        devices: 1,
        scrub_every_free: false,
        identity: Some([7; 16]),
    };
    seeds.push(("worker_setup".to_owned(), [vec![10, 0], codec::encode(&worker)?].concat()));
    Ok(seeds)
}

// ---- PTX ----

/// Each kernel of the engine's test data with the text before the first one; whole files are too long as seeds.
fn ptx() -> Result<Vec<Seed>> {
    const LONGEST: usize = 24 << 10;
    let folder = paths::workspace().join("softgpu/engine/tests/data");
    let mut seeds = Vec::new();
    for entry in fs::read_dir(&folder).with_context(|| format!("reading {}", folder.display()))? {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "ptx") {
            continue;
        }
        let name = path.file_stem().and_then(|stem| stem.to_str()).context("a name")?.to_owned();
        let text = fs::read_to_string(&path)?;
        let starts: Vec<usize> = text.match_indices(".visible .entry").map(|(at, _)| at).collect();
        let first = starts.first().copied().unwrap_or(text.len());
        for (number, start) in starts.iter().enumerate() {
            let end = starts.get(number + 1).copied().unwrap_or(text.len());
            let piece = format!("{}{}", &text[..first], &text[*start..end]);
            if piece.len() <= LONGEST {
                seeds.push((format!("{name}-{number}"), piece.into_bytes()));
            }
        }
    }
    ensure!(!seeds.is_empty(), "no PTX in {}", folder.display());
    // Two texts, of which one calls a function of the other and names its variable.
    let head = ".version 7.0 .target sm_80 .address_size 64";
    let caller = ".extern .func helper; .extern .global .u32 x; .visible .entry run() { .reg .b32 %r; call.uni helper; \
        ld.global.u32 %r, [x]; ret; }";
    let helper = ".visible .global .u32 x = 5; .weak .func helper { ret; }";
    let sparse = "{ .reg .b32 %r<17>; .reg .f32 %f<9>; mov.b32 %r0, 0x44444444; \
        mma.sp::ordered_metadata.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f0, %f1, %f2, %f3}, {%r1, %r2}, {%r3, %r4}, \
        {%f4, %f5, %f6, %f7}, %r0, 3; \
        mma.sp.sync.aligned.m16n8k128.row.col.satfinite.s32.s4.u4.s32 {%r1, %r2, %r3, %r4}, {%r5, %r6, %r7, %r8}, \
        {%r9, %r10, %r11, %r12}, {%r13, %r14, %r15, %r16}, %r0, 0; ret; }";
    let sparse = format!(".version 8.5 .target sm_80 .address_size 64 .visible .entry sparse() {sparse}");
    seeds.push(("sparse".to_owned(), sparse.into_bytes()));
    seeds.push(("linked".to_owned(), format!("{head} {caller}\0{head} {helper}").into_bytes()));
    Ok(seeds)
}

// ---- images ----

const PTX: u16 = 1;
const ELF: u16 = 2;
const LZ4: u64 = 0x2000;
const ZSTD: u64 = 0x8000;

fn fatbin() -> Vec<Seed> {
    let mut text = b".version 8.0\n.target sm_80\n.address_size 64\n".to_vec();
    for register in 0..40 {
        text.extend(format!("\tmov.u32 %r{register}, %tid.x;\n").bytes());
    }
    let cubin = cubin();
    let compressed = lz4_flex::block::compress(&text);
    let packed = ruzstd::encoding::compress_to_vec(&text[..], ruzstd::encoding::CompressionLevel::Fastest);
    let entries = [
        entry(PTX, 75, 0, &text, 0),
        entry(PTX, 80, LZ4, &compressed, text.len()),
        entry(PTX, 70, ZSTD, &packed, text.len()),
        entry(ELF, 80, 0, &cubin, 0),
    ];
    let mut wrapper = vec![0xb1, 0x43, 0x62, 0x46, 1, 0, 0, 0, 0, 0x10];
    wrapper.resize(24, 0);
    let mut seeds = vec![
        ("text".to_owned(), text),
        ("cubin".to_owned(), cubin),
        ("wrapper".to_owned(), wrapper),
        ("all".to_owned(), fatbin_of(&entries)),
    ];
    for (name, one) in ["plain", "lz4", "zstd", "elf"].into_iter().zip(entries) {
        seeds.push((name.to_owned(), fatbin_of(&[one])));
    }
    seeds
}

fn fatbin_of(entries: &[Vec<u8>]) -> Vec<u8> {
    let body = entries.concat();
    let mut bytes = vec![0x50, 0xed, 0x55, 0xba, 1, 0, 16, 0];
    bytes.extend((body.len() as u64).to_le_bytes());
    bytes.extend(body);
    bytes
}

/// An entry as the compiler lays it out; `unpacked` is 0 for one that is not compressed.
fn entry(kind: u16, arch: u32, flags: u64, payload: &[u8], unpacked: usize) -> Vec<u8> {
    const HEADER: u32 = 96;
    let padded = payload.len().next_multiple_of(8);
    let stored = if unpacked == 0 { 0 } else { payload.len() };
    let mut bytes = Vec::new();
    bytes.extend(kind.to_le_bytes());
    bytes.extend(0x101_u16.to_le_bytes());
    bytes.extend(HEADER.to_le_bytes());
    bytes.extend((padded as u64).to_le_bytes());
    bytes.extend(u32::try_from(stored).unwrap_or(0).to_le_bytes());
    bytes.extend([0; 4]);
    bytes.extend([5, 0, 9, 0]);
    bytes.extend(arch.to_le_bytes());
    bytes.extend([0; 8]);
    bytes.extend(flags.to_le_bytes());
    bytes.extend([0; 8]);
    bytes.extend((unpacked as u64).to_le_bytes());
    bytes.resize(HEADER as usize, 0);
    bytes.extend(payload);
    bytes.resize(HEADER as usize + padded, 0);
    bytes
}

/// A cubin with the description of a kernel `k` and some memory.
fn cubin() -> Vec<u8> {
    let mut info = vec![4, 0x0a, 8, 0, 1, 0, 0, 0, 0x60, 1, 0x1c, 0, 3, 0x19, 20, 0];
    for (ordinal, offset, size) in [(2_u16, 16_u16, 4_u32), (1, 8, 8), (0, 0, 8)] {
        info.extend([4, 0x17, 12, 0, 0, 0, 0, 0]);
        info.extend(ordinal.to_le_bytes());
        info.extend(offset.to_le_bytes());
        info.extend((size << 18 | 0x1f000).to_le_bytes());
    }
    let names = b"\0.nv.info.k\0.nv.global\0.text.k\0.shstrtab\0";
    let sections: [(u32, u32, &[u8], u64); 4] = [
        (1, 0x7000_0000, &info, info.len() as u64),
        (12, 8, &[], 64),
        (23, 1, &[0; 16], 16),
        (31, 3, names, names.len() as u64),
    ];
    let mut bytes = vec![0; 64];
    bytes[..8].copy_from_slice(b"\x7fELF\x02\x01\x01\x41");
    bytes[18..20].copy_from_slice(&190_u16.to_le_bytes());
    let mut table = vec![0; 64];
    for (name, kind, contents, size) in sections {
        let mut header = [0; 64];
        header[..4].copy_from_slice(&name.to_le_bytes());
        header[4..8].copy_from_slice(&kind.to_le_bytes());
        header[24..32].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
        header[32..40].copy_from_slice(&size.to_le_bytes());
        bytes.extend(contents);
        table.extend(header);
    }
    let start = bytes.len() as u64;
    bytes[40..48].copy_from_slice(&start.to_le_bytes());
    bytes[58..60].copy_from_slice(&64_u16.to_le_bytes());
    bytes[60..62].copy_from_slice(&5_u16.to_le_bytes());
    bytes[62..64].copy_from_slice(&4_u16.to_le_bytes());
    bytes.extend(table);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Decodes the fields of a call of the table.
    macro_rules! decode {
        ($($thread:ident { $($(#[doc = $doc:literal])* $id:literal $class:ident $name:ident $(<$life:lifetime>)?
            ($($p:ident: $ty:ty),*) -> ($($r:ident: $rty:ty),*);)+ })+) => {
            fn decode(call: u16, fields: &[u8]) -> Result<(), FieldError> {
                match call {
                    $($($id => wire::$name::Args::get(fields).map(drop),)+)+
                    _ => Err(FieldError::Range),
                }
            }
        };
    }
    sluice_protocol::for_each_wire_call!(decode);

    #[test]
    fn every_record_of_a_seed_about_images_decodes() {
        let seeds = images().unwrap();
        assert_eq!(seeds.len(), 7);
        for (name, seed) in seeds {
            let mut rest = &seed[8..];
            while !rest.is_empty() {
                let size = u32::from_le_bytes(*rest.first_chunk().unwrap());
                let (record, behind) = rest.split_at(usize::try_from(size).unwrap());
                let (header, fields) = Header::read(record).unwrap();
                decode(header.call, fields).unwrap_or_else(|error| panic!("{name}: {error}"));
                rest = behind;
            }
        }
    }

    #[test]
    fn every_row_has_a_seed_that_decodes() {
        for row in WIRE {
            let record = record(row, 1).unwrap();
            let (header, fields) = Header::read(&record).unwrap();
            assert_eq!(header.call, row.id);
            decode(row.id, fields).unwrap_or_else(|error| panic!("{}: {error}", row.name));
        }
    }
}
