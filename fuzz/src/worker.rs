//! A worker's session on a driver that does nothing, which serves many inputs: starting one takes milliseconds.
//!
//! `SLUICE_NULL_DRIVER` names the driver.

use sluice_protocol::{
    calls::{self, wire},
    field::{ArenaIn, ArenaText, CarriedOptions, FieldError, Mint, Name, Ordinal, Size, Take, Writer},
    handle::{ConditionalGraph, Context, Function, GraphExecutable, Id, Module},
    limits,
    record::{HEADER_BYTES, Header, NO_REPLY, NO_STREAM},
    reply,
    ring::Consumer,
    session,
    shared::Shared as _,
};
use sluice_worker::harness::{ARENA_BYTES, Harness};
use std::{
    path::PathBuf,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

/// Offset in the arena of an input that is a plan.
const PLAN_AT: usize = 64 << 10;
/// Stands for the handle of a conditional node in an input.
const HANDLE: u64 = 0x6a6e_1e5e_ed00_0001;
/// Maximum bytes of ring that one input fills.
const INPUT: usize = 64 << 10;
/// The reply slot of the target's own calls.
const OWN_SLOT: u32 = limits::REPLY_SLOTS - 1;
/// The reply slot of calls without a reply: without one, a refused call would end all further work.
const POST_SLOT: u32 = limits::REPLY_SLOTS - 2;

const NOT_READY: u32 = sluice_cuda_abi::sys::CUresult::CUDA_ERROR_NOT_READY as u32;
/// Maximum number of sessions of one process: each has a gibibyte of addresses.
const PLACES: u64 = 400;

/// A session and the calls that a target makes itself.
#[derive(Debug)]
pub struct Session {
    /// The worker.
    pub harness: Harness,
    place: u64,
    ticket: u32,
    record: Box<[u8; limits::RECORD_BYTES]>,
}

impl Session {
    /// Starts a session at addresses of its own.
    ///
    /// # Panics
    /// If the driver does not load.
    #[must_use]
    pub fn start(place: u64) -> Session {
        let driver = std::env::var_os("SLUICE_NULL_DRIVER").map(PathBuf::from);
        let driver = driver.expect("SLUICE_NULL_DRIVER names the driver that does nothing");
        let mut session = Session {
            harness: Harness::new(&driver, place),
            place,
            ticket: 0,
            record: Box::new([0; limits::RECORD_BYTES]),
        };
        session.ask(wire::session_hello::CALL, |w| {
            wire::session_hello::Args { version: calls::VERSION, process: 1 }.put(w)
        });
        session
    }

    /// Returns from the function that the worker has called, if any: its stream would be held for ever.
    fn return_host_calls(&self) {
        let words = self.harness.words();
        session::set_host_return(&words, session::host_call(&words));
    }

    /// Makes a call of the target's own; returns its CUresult.
    fn ask(&mut self, call: u16, put: impl FnOnce(&mut Writer<'_>) -> Result<(), FieldError>) -> u32 {
        self.answered(call, put).0
    }

    /// Makes a call of the target's own; returns its CUresult and the fields of its answer.
    fn answered(
        &mut self,
        call: u16,
        put: impl FnOnce(&mut Writer<'_>) -> Result<(), FieldError>,
    ) -> (u32, [u8; limits::REPLY_BYTES]) {
        self.ticket = self.ticket.wrapping_add(1).max(1);
        let header = Header {
            call,
            reply: OWN_SLOT,
            ticket: self.ticket,
            context: Id::<Context>::new(0, 1).raw(),
            stream: NO_STREAM,
            thread: 0,
            sequence: 0,
        };
        let mut buffer = [0; 4096];
        let record = header.build(&mut buffer, put).expect("fits");
        self.harness.record(record).expect("a lawful record");
        let words = self.harness.words();
        let timeout = Instant::now() + Duration::from_secs(20);
        while !reply::is_ready(&words, OWN_SLOT, self.ticket) {
            assert!(Instant::now() < timeout, "no answer to call {call:#06x}");
            self.return_host_calls();
            self.harness.ring_is_empty();
            std::thread::yield_now();
        }
        let mut fields = [0; limits::REPLY_BYTES];
        let (code, _) = reply::take(&words, OWN_SLOT, &mut fields);
        (code, fields)
    }

    /// Brings the session back to the state in which every input begins: a context, a library, a function, an
    /// array, and an array with levels. `false` if the
    /// previous input has spoiled it.
    pub fn reset(&mut self) -> bool {
        self.harness.permit(true);
        if !self.harness.is_healthy() {
            eprintln!("the session is over: posted work failed");
            return false;
        }
        self.harness.restore();
        // The helpers may still have work: the driver detects the use of a context that is gone.
        let (_, contexts) = self.harness.live();
        for context in contexts {
            // Work is under way, and the submitter may still have work that a closed permit held up.
            let destroy = |w: &mut Writer<'_>| wire::context_destroy::Args { context }.put(w);
            let timeout = Instant::now() + Duration::from_secs(20);
            let mut held = false;
            while self.ask(wire::context_destroy::CALL, destroy) == NOT_READY {
                // A stream may wait for a word of the arena: in the null driver, until it is not 0.
                if !held {
                    self.fill_arena(1);
                    held = true;
                }
                assert!(Instant::now() < timeout, "a context stays in use");
                self.return_host_calls();
                std::thread::yield_now();
            }
            if held {
                self.fill_arena(0);
                self.harness.restore();
            }
        }
        // Pending requests are answered before libraries are unloaded.
        self.ask(wire::module_function_count::CALL, |w| {
            wire::module_function_count::Args { module: Id::new(0, 1) }.put(w)
        });
        let (modules, _) = self.harness.live();
        for module in modules {
            self.ask(wire::module_unload::CALL, |w| {
                wire::module_unload::Args { module: Take(module) }.put(w)
            });
        }
        let image = self.harness.arena;
        let (context, module, function) =
            (Id::<Context>::new(0, 1), Id::<Module>::new(0, 1), Id::<Function>::new(0, 1));
        let create = |w: &mut Writer<'_>| {
            wire::context_create::Args {
                context: Mint(context),
                device: Ordinal(0),
                flags: 0,
                primary: true,
                stream: 0,
            }
            .put(w)
        };
        let load = |w: &mut Writer<'_>| {
            wire::module_load::Args {
                module: Mint(module),
                library: true,
                image: ArenaIn { address: image, bytes: 64 },
                options: CarriedOptions::NONE,
                info: Size(0),
                error: Size(0),
                report: ArenaText { address: 0, bytes: 0 },
            }
            .put(w)
        };
        let find = |w: &mut Writer<'_>| {
            wire::module_function::Args { module, function: Mint(function), name: Name(b"work_p1") }.put(w)
        };
        let draw = |w: &mut Writer<'_>| {
            let (extent, array) = ([16, 8, 2], Mint(Id::new(0, 1)));
            wire::array_create::Args { extent, format: 0x20, channels: 1, flags: 0, array }.put(w)
        };
        let draw_levels = |w: &mut Writer<'_>| {
            let (extent, array) = ([16, 8, 0], Mint(Id::new(0, 1)));
            wire::mipmapped_array_create::Args {
                extent,
                format: 0x20,
                channels: 1,
                flags: 0,
                levels: 3,
                array,
            }
            .put(w)
        };
        let steps = [
            self.ask(wire::context_create::CALL, create),
            self.ask(wire::module_load::CALL, load),
            self.ask(wire::module_function::CALL, find),
            self.ask(wire::array_create::CALL, draw),
            self.ask(wire::mipmapped_array_create::CALL, draw_levels),
        ];
        if steps != [0; 5] {
            eprintln!("the session is spoiled: {steps:?}");
        }
        steps == [0; 5]
    }

    /// Writes one value to all bytes of the arena.
    fn fill_arena(&self, byte: u8) {
        self.harness.arena_words().write(0, &vec![byte; ARENA_BYTES as usize]);
    }

    /// Publishes data as a guest does, and executes its records: the tail is off by `skew`.
    ///
    /// # Panics
    /// If the consumer passes on a record of an impossible size.
    pub fn run(&mut self, skew: u64, bytes: &[u8]) {
        let bytes = &bytes[..bytes.len().min(INPUT)];
        let words = self.harness.words();
        let padded = bytes.len().next_multiple_of(8) as u64;
        words.write(session::RING_AT, bytes);
        words.write(session::RING_AT + bytes.len(), &[0; 8]);
        words.store_u64(session::RING_TAIL, padded.wrapping_add(skew), Ordering::Release);
        let mut consumer = Consumer::new();
        // A party that changes the ring meanwhile could go on for ever.
        for _ in 0..INPUT / HEADER_BYTES {
            let Ok(Some(size)) = consumer.next(&words, &mut self.record) else { break };
            assert!((HEADER_BYTES..=limits::RECORD_BYTES).contains(&size));
            if let Ok((header, _)) = Header::read(&self.record[..size]) {
                if header.reply == NO_REPLY {
                    self.record[8..12].copy_from_slice(&POST_SLOT.to_le_bytes());
                }
                let due = self.harness.next_sequence(header.stream);
                self.record[32..40].copy_from_slice(&header.sequence.wrapping_add(due).to_le_bytes());
            }
            // Names that make the driver follow a pointer or fail for good.
            let special = |name: &[u8]| self.record[..size].windows(name.len()).any(|part| part == name);
            if special(b"hold") || special(b"fault") {
                break;
            }
            // The thread word is for diagnostics; its lowest bits open and close the permit.
            match self.record[28] {
                1 => self.harness.permit(false),
                2 => self.harness.permit(true),
                _ => {}
            }
            // A violation would end the session.
            if self.harness.record(&self.record[..size]).is_err() {
                break;
            }
            self.harness.ring_is_empty();
        }
    }

    /// Makes an executable graph of bytes as a guest's plan, uses the bytes as changes of it, too, launches it and destroys it.
    pub fn graph(&mut self, bytes: &[u8]) {
        let conditional = Id::<ConditionalGraph>::new(0, 1);
        self.ask(wire::conditional_graph_create::CALL, |w| {
            wire::conditional_graph_create::Args { graph: Mint(conditional) }.put(w)
        });
        let create = |w: &mut Writer<'_>| {
            wire::conditional_handle_create::Args { graph: conditional, value: 1, flags: 1 }.put(w)
        };
        let (_, fields) = self.answered(wire::conditional_handle_create::CALL, create);
        let handle = wire::conditional_handle_create::Reply::get(&fields).map_or(0, |reply| reply.handle);
        let mut bytes = bytes[..bytes.len().min(INPUT)].to_vec();
        for word in bytes.as_chunks_mut::<8>().0 {
            if u64::from_le_bytes(*word) == HANDLE {
                *word = handle.to_le_bytes();
            }
        }
        self.harness.arena_words().write(PLAN_AT, &bytes);
        let (address, bytes) = (self.harness.arena + PLAN_AT as u64, bytes.len() as u64);
        let graph = Id::<GraphExecutable>::new(0, 1);
        let plan = ArenaIn { address, bytes };
        let make =
            |w: &mut Writer<'_>| wire::graph_instantiate::Args { flags: 0, plan, graph: Mint(graph) }.put(w);
        let update = |w: &mut Writer<'_>| wire::graph_update::Args { graph, plan }.put(w);
        let change = |w: &mut Writer<'_>| wire::graph_set_work::Args { graph, change: plan }.put(w);
        self.ask(wire::graph_instantiate::CALL, make);
        self.launch(graph);
        self.ask(wire::graph_update::CALL, update);
        self.ask(wire::graph_set_work::CALL, change);
        self.launch(graph);
        self.ask(wire::graph_destroy::CALL, |w| wire::graph_destroy::Args { graph }.put(w));
        self.ask(wire::conditional_graph_destroy::CALL, |w| {
            wire::conditional_graph_destroy::Args { graph: Take(conditional) }.put(w)
        });
    }

    /// Launches an executable graph in the default stream.
    fn launch(&mut self, graph: Id<GraphExecutable>) {
        let header = Header {
            call: wire::graph_launch::CALL,
            reply: NO_REPLY,
            ticket: 0,
            context: Id::<Context>::new(0, 1).raw(),
            stream: 0,
            thread: 0,
            sequence: self.harness.next_sequence(0),
        };
        let mut buffer = [0; 4096];
        let record = header.build(&mut buffer, |w| wire::graph_launch::Args { graph }.put(w)).expect("fits");
        self.harness.record(record).expect("a lawful record");
        self.harness.ring_is_empty();
    }

    /// Makes a call that a helper serves, with any result.
    ///
    /// # Panics
    /// If there is no answer.
    pub fn must_answer(&mut self) {
        self.harness.permit(true);
        if self.harness.is_healthy() {
            self.ask(wire::module_function_count::CALL, |w| {
                wire::module_function_count::Args { module: Id::new(0, 1) }.put(w)
            });
        }
    }

    /// Resets the session in `current`, or starts another in its place.
    ///
    /// # Panics
    /// If inputs spoil too many sessions.
    pub fn ready(current: &mut Option<Session>) -> &mut Session {
        let session = current.get_or_insert_with(|| Session::start(0));
        if !session.reset() {
            // Its threads and its addresses remain; there is room for some hundreds.
            let place = session.place + 1;
            assert!(place < PLACES, "inputs spoil too many sessions");
            *session = Session::start(place);
            assert!(session.reset(), "a new session can be used");
        }
        session
    }
}
