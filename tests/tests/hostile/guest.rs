//! A session of a front-end that breaks all rules.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::scene::Scene;
use anyhow::{Context as _, Result, bail, ensure};
use sluice_kit::front_end::{FREE, FrontEnd};
use sluice_kit::guest::{self, Answer, FakeGuest};
use sluice_protocol::calls::{self, wire};
use sluice_protocol::doorbell::Doorbell;
use sluice_protocol::field::{
    ArenaIn, ArenaText, CarriedOptions, FieldError, Mint, Name, Ordinal, Size, Writer,
};
use sluice_protocol::handle::{self, Id};
use sluice_protocol::limits;
use sluice_protocol::record::{HEADER_BYTES, Header};
use sluice_protocol::session::{self, Attachment};
use sluice_protocol::shared::Shared;
use sluice_shared_memory::mapping::Words;
use sluice_tests::direct::TIMEOUT;

pub(super) const OK: u32 = 0x1100;
/// Guest-physical addresses of the control resource and an arena.
pub(super) const CONTROL: u64 = FREE;
pub(super) const PAGES: u64 = FREE + 0x40_0000;
pub(super) const PAGES_BYTES: u32 = 4 << 20;
/// Address at which the worker maps the arena.
pub(super) const ARENA: u64 = limits::WINDOW_BOUNDS.start;
pub(super) const WINDOW: u64 = 0x7e80_0000_0000;
pub(super) const KERNEL: &[u8] = b".version 8.0\n.target sm_80\n.address_size 64\n\
    .visible .entry k(.param .u64 k_param_0, .param .u32 k_param_1) { ret; }\n\0";

/// The session's page within the front-end's memory.
#[derive(Clone, Copy)]
pub(super) struct Page(Words);

impl Page {
    pub(super) const AT: usize = CONTROL as usize;
}

impl Shared for Page {
    fn load_u32(&self, at: usize, order: Ordering) -> u32 {
        self.0.load_u32(Page::AT + at, order)
    }
    fn store_u32(&self, at: usize, value: u32, order: Ordering) {
        self.0.store_u32(Page::AT + at, value, order);
    }
    fn swap_u32(&self, at: usize, value: u32) -> u32 {
        self.0.swap_u32(Page::AT + at, value)
    }
    fn load_u64(&self, at: usize, order: Ordering) -> u64 {
        self.0.load_u64(Page::AT + at, order)
    }
    fn store_u64(&self, at: usize, value: u64, order: Ordering) {
        self.0.store_u64(Page::AT + at, value, order);
    }
    fn read(&self, at: usize, into: &mut [u8]) {
        self.0.read(Page::AT + at, into);
    }
    fn write(&self, at: usize, from: &[u8]) {
        self.0.write(Page::AT + at, from);
    }
    fn fence(&self) {
        self.0.fence();
    }
}

pub(super) struct Guest {
    pub(super) front_end: FrontEnd,
    pub(super) session: FakeGuest<Page>,
}

/// Appends the fields of a call.
pub(super) type Put<'p> = &'p dyn Fn(&mut Writer<'_>) -> Result<(), FieldError>;

impl Guest {
    pub(super) fn start(scene: &Scene) -> Result<Guest> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let mut front_end = FrontEnd::connect(&scene.backend.socket()?);
            front_end.words.write(CONTROL as usize, &[0; session::REPLIES_AT]);
            front_end.open(1, 10, CONTROL);
            let page = Page(front_end.words);
            while page.load_u32(session::STATE, Ordering::Acquire) == session::NEW {
                ensure!(Instant::now() < deadline, "no worker comes\n{}", scene.backend.printed());
                std::thread::sleep(Duration::from_millis(1));
            }
            if session::lost(&page).is_none() {
                return Ok(Guest { front_end, session: FakeGuest::new(page) });
            }
            // Too many sessions in a short time: the guest gets an error, and may try again.
            ensure!(Instant::now() < deadline, "no session\n{}", scene.backend.printed());
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    pub(super) fn lost(&self) -> Option<u32> {
        self.session.lost()
    }

    /// Checks that the session ends with an error.
    pub(super) fn ends(&self, why: &str) -> Result<()> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            if let Some(error) = self.lost() {
                ensure!(error != 0, "{why}: lost without an error");
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "{why}: the session lives on");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub(super) fn ring(&mut self) {
        if self.session.must_ring() {
            self.front_end.doorbell(1, Doorbell::Ring);
        }
    }

    /// Publishes bytes unchanged.
    pub(super) fn publish(&mut self, record: &[u8]) -> Result<()> {
        let deadline = Instant::now() + TIMEOUT;
        while !self.session.publish(record) {
            ensure!(Instant::now() < deadline, "the ring stays full");
            self.ring();
        }
        self.ring();
        Ok(())
    }

    pub(super) fn header(&self, call: u16) -> Header {
        self.session.header(call)
    }

    pub(super) fn call(&mut self, header: Header, put: Put<'_>) -> Result<Answer> {
        let header = self.session.answered(header);
        self.publish(&guest::record(header, put))?;
        let deadline = Instant::now() + TIMEOUT;
        loop {
            if let Some(answer) = self.session.answer(header.ticket) {
                return Ok(answer);
            }
            if let Some(error) = self.lost() {
                bail!("call {:#06x}: the session is lost with {error}", header.call);
            }
            ensure!(Instant::now() < deadline, "call {:#06x} is not answered", header.call);
            std::thread::yield_now();
        }
    }

    pub(super) fn ask(&mut self, call: u16, put: Put<'_>) -> Result<u32> {
        Ok(self.call(self.header(call), put)?.0)
    }

    /// Submits work on stream slot 0.
    pub(super) fn work(&mut self, call: u16, put: Put<'_>) -> Result<u32> {
        let header = self.session.on(call, 0);
        Ok(self.call(header, put)?.0)
    }

    /// Creates the objects of a lawful program: a context, an arena, device memory, a kernel of 12 parameter bytes.
    pub(super) fn settle(&mut self) -> Result<u64> {
        let context = Id::<handle::Context>::new(0, 1);
        self.lawful(wire::session_hello::CALL, &|w| {
            wire::session_hello::Args { version: calls::VERSION, process: 1 }.put(w)
        })?;
        self.lawful(wire::window_reserve::CALL, &|w| {
            wire::window_reserve::Args { base: WINDOW, bytes: Size(1 << 30) }.put(w)
        })?;
        self.lawful(wire::context_create::CALL, &|w| {
            wire::context_create::Args {
                context: Mint(context),
                device: Ordinal(0),
                flags: 0,
                primary: true,
                stream: 0,
            }
            .put(w)
        })?;
        self.session.context = context.raw();
        ensure!(
            self.attach(20, 1, ARENA, &[(PAGES, PAGES_BYTES)])? == Attachment::Adopted(PAGES_BYTES.into())
        );
        self.front_end.words.write(PAGES as usize, KERNEL);
        let module = Id::<handle::Module>::new(0, 1);
        self.lawful(wire::module_load::CALL, &|w| {
            let image = ARENA;
            wire::module_load::Args {
                module: Mint(module),
                library: true,
                image: ArenaIn { address: image, bytes: 4096 },
                options: CarriedOptions::NONE,
                info: Size(0),
                error: Size(0),
                report: ArenaText { address: 0, bytes: 0 },
            }
            .put(w)
        })?;
        let function = Mint(Id::<handle::Function>::new(0, 1));
        self.lawful(wire::module_function::CALL, &|w| {
            wire::module_function::Args { module, function, name: Name(b"k") }.put(w)
        })?;
        let fields = self.lawful(wire::memory_allocate::CALL, &|w| {
            wire::memory_allocate::Args { pool: 0, bytes: Size(4096) }.put(w)
        })?;
        let reply = wire::memory_allocate::Reply::get(&fields).context("an address")?;
        Ok(reply.address)
    }

    /// A call that succeeds; returns the fields of its answer.
    fn lawful(&mut self, call: u16, put: Put<'_>) -> Result<Vec<u8>> {
        let (result, fields) = self.call(self.header(call), put)?;
        ensure!(result == 0, "lawful call {call:#06x} answers {result}");
        Ok(fields)
    }

    /// Creates a resource, attaches it, and waits for the result.
    pub(super) fn attach(
        &mut self,
        id: u32,
        slot: u32,
        address: u64,
        pages: &[(u64, u32)],
    ) -> Result<Attachment> {
        ensure!(self.front_end.resource(1, id, pages) == OK, "resource {id}");
        self.attach_again(id, slot, address)
    }

    pub(super) fn attach_again(&mut self, resource: u32, slot: u32, address: u64) -> Result<Attachment> {
        session::set_attachment(&self.session.page, slot, Attachment::Pending);
        let answer = self.front_end.doorbell(1, Doorbell::Attach { resource, slot, address });
        let deadline = Instant::now() + TIMEOUT;
        loop {
            match session::attachment(&self.session.page, slot) {
                Attachment::Pending if answer == OK || slot < limits::ATTACHMENTS => {}
                Attachment::Pending => return Ok(Attachment::Refused(answer)),
                other => return Ok(other),
            }
            ensure!(self.lost().is_none(), "attaching ends the session");
            ensure!(Instant::now() < deadline, "attaching is not answered (the command: {answer:#x})");
            std::thread::yield_now();
        }
    }
}

/// The raw record of a call with these words as fields.
pub(super) fn record(header: Header, fields: &[u64]) -> Vec<u8> {
    let mut bytes = vec![0; HEADER_BYTES];
    if let Some(head) = bytes.first_chunk_mut() {
        let size = u32::try_from(HEADER_BYTES + fields.len() * 8).unwrap_or(u32::MAX);
        header.write(size, head);
    }
    bytes.extend(fields.iter().flat_map(|word| word.to_le_bytes()));
    bytes
}
