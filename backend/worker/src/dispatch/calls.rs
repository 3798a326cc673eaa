//! The calls of the wire table as the dispatcher serves them: a record is checked, and then served by code that is generated from the
//! table, section by section.
//!
//! A call of the section `inline` is served by its own method ([`Inline`]). One of the section `stream` becomes an operation
//! ([`OnStream`]), which is submitted in the order of its stream; a launch ([`Launches`]) has parameters, or may need local memory.
//! Calls of the other sections are resolved and handed to the helper thread that serves them; for those of the section `quick` the
//! dispatcher first tries without the helper ([`Quick`]).

use super::{Dispatcher, Violation, reply_to};
use crate::{
    helper::{
        jobs::{MemoryCall, MemoryJob, ModuleCall, ModuleJob, memory, module},
        kinds::Resolve,
    },
    session::objects::ContextRef,
    submit::{Operation, queue::QueueItem},
};
use sluice_driver::Code;
#[allow(clippy::wildcard_imports, reason = "the kinds of the table")]
use sluice_protocol::{
    calls::{Dispatched, Handler, Outcome, dispatch, wire},
    field::*,
    handle::*,
    image::{ImageResource, ImageView, Sampling},
    limits,
    record::{Header, NO_REPLY},
    resources::ResourceBytes,
};

/// The answer to a call, or `None` if another thread answers it.
pub(super) type Served<R> = Result<Option<R>, Code>;

fn outcome<R>(served: Served<R>) -> Outcome<R> {
    match served {
        Ok(Some(reply)) => Outcome::Done(reply),
        Ok(None) => Outcome::Later,
        Err(failed) => Outcome::Failed(failed),
    }
}

/// Serves a call as its section of the table prescribes.
macro_rules! serve {
    (inline $class:ident $name:ident $this:ident $header:ident $args:ident { $($fields:tt)* }) => {
        Inline::$name($this, $header, &$args)
    };
    (launch $class:ident $name:ident $this:ident $header:ident $args:ident { $($fields:tt)* }) => {
        Launches::$name($this, $header, &$args)
    };
    (stream $class:ident $name:ident $this:ident $header:ident $args:ident { $($fields:tt)* }) => {{
        let operation = OnStream::$name($this, &$args);
        Ok($this.work($header, operation)?.then(wire::$name::Reply {}))
    }};
    (quick $class:ident $name:ident $this:ident $header:ident $args:ident { $($fields:tt)* }) => {
        match Quick::$name($this, $header, &$args)? {
            Some(reply) => Ok(Some(reply)),
            None => serve!(memory $class $name $this $header $args { $($fields)* }),
        }
    };
    (memory $class:ident $name:ident $this:ident $header:ident $args:ident { $($p:ident: $ty:ty),* }) => {{
        let call = MemoryCall::$name(memory::$name { $($p: $args.$p.resolve($this)?,)* });
        let job = MemoryJob::Call { to: reply_to($header), caller: $this.context($header).ok(), call };
        hand!(memory $class $this job);
        Ok(None)
    }};
    (module $class:ident $name:ident $this:ident $header:ident $args:ident { $($p:ident: $ty:ty),* }) => {{
        $(let $p = $args.$p.resolve($this)?;)*
        let context = [$(<$ty as Resolve>::context(&$p)),*].into_iter().flatten().next();
        let call = ModuleCall::$name(module::$name { $($p),* });
        let job = ModuleJob::Call { to: reply_to($header), caller: $this.caller_for($header, context), call };
        hand!(module $class $this job);
        Ok(None)
    }};
    (image $($call:tt)*) => {
        serve!(module $($call)*)
    };
}

/// Hands a call to its helper: at once, or after all posted work.
macro_rules! hand {
    (memory sync $this:ident $job:ident) => {
        $this.memory_job($job)
    };
    (memory $ordered:ident $this:ident $job:ident) => {
        $this.ordered(QueueItem::Memory($job))
    };
    (module sync $this:ident $job:ident) => {
        $this.module_job($job)
    };
    (module $ordered:ident $this:ident $job:ident) => {
        $this.ordered(QueueItem::Module(Box::new($job)))
    };
}

macro_rules! handler {
    ($($thread:ident { $($(#[doc = $doc:literal])* $id:literal $class:ident $name:ident $(<$life:lifetime>)?
        ($($p:ident: $ty:ty),*) -> ($($r:ident: $rty:ty),*);)+ })+) => {
        impl Handler for Dispatcher {
            $($(
                fn $name$(<$life>)?(&mut self, header: &Header, args: wire::$name::Args$(<$life>)?)
                    -> Outcome<wire::$name::Reply> {
                    let mut serve = || -> Served<wire::$name::Reply> {
                        serve!($thread $class $name self header args { $($p: $ty),* })
                    };
                    outcome(serve())
                }
            )+)+
        }
    };
}
sluice_protocol::for_each_wire_call!(handler);

/// Declares the traits of the dispatcher: one method for each row of its sections.
macro_rules! sections {
    (inline { $($(#[doc = $i_doc:literal])* $i_id:literal $i_class:ident $inline:ident $(<$i_life:lifetime>)? ($($i_p:tt)*) -> ($($i_r:tt)*);)+ }
        launch { $($(#[doc = $l_doc:literal])* $l_id:literal $l_class:ident $launch:ident $(<$l_life:lifetime>)? ($($l_p:tt)*) -> ($($l_r:tt)*);)+ }
        stream { $($(#[doc = $s_doc:literal])* $s_id:literal $s_class:ident $stream:ident ($($s_p:tt)*) -> ($($s_r:tt)*);)+ }
        quick { $($(#[doc = $q_doc:literal])* $q_id:literal $q_class:ident $quick:ident ($($q_p:tt)*) -> ($($q_r:tt)*);)+ }
        $($others:tt)*) => {
        /// Calls that the dispatcher serves itself, or passes on explicitly.
        pub(super) trait Inline {
            $($(#[doc = $i_doc])*
            fn $inline(&mut self, header: &Header, args: &wire::$inline::Args) -> Served<wire::$inline::Reply>;)+
        }

        /// Launches, which are work on the header's stream, too: each checks its arguments and hands itself in.
        pub(super) trait Launches {
            $($(#[doc = $l_doc])*
            fn $launch(&mut self, header: &Header, args: &wire::$launch::Args) -> Served<wire::$launch::Reply>;)+
        }

        /// Calls that are work on the header's stream: each checks its arguments and turns them into an operation.
        pub(super) trait OnStream {
            $($(#[doc = $s_doc])*
            fn $stream(&self, args: &wire::$stream::Args) -> Result<Operation, Code>;)+
        }

        /// The dispatcher's part of calls that the memory helper serves: `None` leaves the call to the helper.
        pub(super) trait Quick {
            $($(#[doc = $q_doc])*
            fn $quick(&mut self, header: &Header, args: &wire::$quick::Args) -> Served<wire::$quick::Reply>;)+
        }
    };
}
sluice_protocol::for_each_wire_call!(sections);

impl Dispatcher {
    /// Executes one record, from its private copy.
    pub(crate) fn record(
        &mut self,
        record: &[u8],
        answer: &mut [u8; limits::REPLY_BYTES],
    ) -> Result<(), Violation> {
        let (header, fields) = Header::read(record).map_err(Violation::Header)?;
        if header.reply != NO_REPLY && header.reply >= limits::REPLY_SLOTS {
            return Err(Violation::Reply(header.reply));
        }
        // After the record was taken: a notice about each object that the record may name was left before the guest could write
        // the record.
        if self.shared.notices.any() {
            self.read_notices();
        }
        self.shared.time.call();
        let to = reply_to(&header);
        if let Some(failed) = self.shared.session.sticky()
            && header.call != wire::console_read::CALL
        {
            self.shared.session.answer(to, failed, &[]);
            return Ok(());
        }
        let dispatched = dispatch(self, &header, fields, answer)?;
        if let Some(violation) = self.violation.take() {
            return Err(violation);
        }
        match dispatched {
            Dispatched::Done(length) => {
                self.shared.session.answer(to, 0, answer.get(..length).unwrap_or_default());
            }
            Dispatched::Failed(failed) => self.shared.session.conclude(to, Err(failed)),
            Dispatched::Later => {}
        }
        Ok(())
    }

    /// The context for a call about an object of `context`, with its device.
    fn caller_for(&mut self, header: &Header, context: Option<ContextRef>) -> Option<(ContextRef, i32)> {
        // The device is that of the context, which may be another than the caller's.
        let of_object = context.and_then(|context| self.contexts.find(|known| known.context == context));
        let found = of_object.copied().or_else(|| self.context(header).ok());
        found.map(|known| (known.context, known.device))
    }
}
