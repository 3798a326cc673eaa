//! The guest's side of a session: records of its calls, its ring, and its answers. The doorbell depends on the transport and
//! stays with each test.

use std::sync::atomic::Ordering;

use sluice_protocol::{
    field::{FieldError, Writer},
    limits,
    park::Parking,
    record::{Header, NO_REPLY, NO_STREAM},
    reply,
    ring::Producer,
    session,
    shared::Shared,
};

/// The reply slot of all calls: one call waits at a time.
const REPLY: u32 = 3;

/// An answer: its CUresult and its fields.
pub type Answer = (u32, Vec<u8>);

/// A session as a program of a guest has it.
pub struct FakeGuest<P> {
    pub page: P,
    pub producer: Producer,
    /// The context of the next calls.
    pub context: u64,
    ticket: u32,
    posted: [u64; 8],
}

impl<P: Shared> FakeGuest<P> {
    pub fn new(page: P) -> Self {
        Self { page, producer: Producer::new(), context: 0, ticket: 0, posted: [0; 8] }
    }

    /// The header of a call without an answer.
    pub fn header(&self, call: u16) -> Header {
        let context = self.context;
        Header { call, reply: NO_REPLY, ticket: 0, context, stream: NO_STREAM, thread: 1, sequence: 0 }
    }

    /// The header of the next work on a stream.
    pub fn on(&mut self, call: u16, slot: u32) -> Header {
        let posted = &mut self.posted[slot as usize];
        *posted += 1;
        let sequence = *posted;
        Header { stream: slot, sequence, ..self.header(call) }
    }

    /// The same header, of a call with an answer.
    pub fn answered(&mut self, header: Header) -> Header {
        self.ticket += 1;
        Header { reply: REPLY, ticket: self.ticket, ..header }
    }

    /// Publishes a record without the doorbell; false if the ring has no room.
    pub fn publish(&mut self, record: &[u8]) -> bool {
        self.producer.publish(&self.page, record).is_ok()
    }

    /// True if the worker sleeps, so that the doorbell must ring.
    pub fn must_ring(&self) -> bool {
        Parking::WORKER.must_wake(&self.page)
    }

    /// The answer to the call with this ticket, once it is there.
    pub fn answer(&self, ticket: u32) -> Option<Answer> {
        reply::is_ready(&self.page, REPLY, ticket).then(|| {
            let mut buffer = [0; limits::REPLY_BYTES];
            let (result, fields) = reply::take(&self.page, REPLY, &mut buffer);
            (result, fields.to_vec())
        })
    }

    pub fn state(&self) -> u32 {
        self.page.load_u32(session::STATE, Ordering::Acquire)
    }

    /// The error that ended the session.
    pub fn lost(&self) -> Option<u32> {
        session::lost(&self.page)
    }
}

/// The bytes of a call.
pub fn record(header: Header, put: impl FnOnce(&mut Writer<'_>) -> Result<(), FieldError>) -> Vec<u8> {
    let mut buffer = vec![0; limits::RECORD_BYTES];
    header.build(&mut buffer, put).expect("the test's own fields").to_vec()
}
