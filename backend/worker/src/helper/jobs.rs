//! The jobs that the dispatcher and the submitter give to the helper threads: calls of the guest, generated from the wire table,
//! and the steps of the worker itself.

use crate::{
    arenas::{Arena, MappedResource},
    graphs::{
        executables::{GraphChanges, GraphRefusal, GraphSerial},
        plan::{GraphPlan, GraphUses, GraphWork},
    },
    helper::kinds::Resolve,
    session::{
        ReplyTo, Session,
        objects::{ContextRef, GuestContext},
    },
};
use sluice_driver::Code;
#[allow(clippy::wildcard_imports, reason = "the kinds of the table")]
use sluice_protocol::{
    calls::wire,
    field::*,
    graph, handle,
    handle::Id,
    image::{ImageResource, ImageView, Sampling},
    limits,
    resources::ResourceBytes,
};
use std::sync::{Arc, mpsc::SyncSender};

/// Concludes a call of a class: the failure of a post is kept for its context.
macro_rules! conclude {
    (post $session:ident $to:ident $result:ident) => {
        $session.conclude($to, $result.map(drop))
    };
    ($answered:ident $session:ident $to:ident $result:ident) => {
        respond($session, $to, $result, |reply, writer| reply.put(writer))
    };
}

/// Declares a trait with one method per call of an area.
macro_rules! methods {
    ($serve:ident($caller:ty), $arguments:ident;
        $($(#[doc = $doc:literal])* $id:literal $class:ident $name:ident $(<$life:lifetime>)?
            ($($p:ident: $ty:ty),*) -> ($($r:ident: $rty:ty),*);)+) => {
        /// One method per call of an area.
        pub(crate) trait $serve {
            $(
                $(#[doc = $doc])*
                fn $name(&mut self, caller: $caller, args: $arguments::$name) -> Result<wire::$name::Reply, Code>;
            )+
        }
    };
}

/// Declares the calls that one helper thread serves: their resolved arguments, one type for all of them, and the trait of the
/// thread, which has the methods of its areas.
macro_rules! calls {
    ($(#[$note:meta])* $arguments:ident, $call:ident<$($all:lifetime)?>, $thread:ident($caller:ty): $($area:ident)+;
        $($(#[doc = $doc:literal])* $id:literal $class:ident $name:ident $(<$life:lifetime>)?
            ($($p:ident: $ty:ty),*) -> ($($r:ident: $rty:ty),*);)+) => {
        /// The resolved arguments of each call.
        #[allow(non_camel_case_types, reason = "the names of the table")]
        pub(crate) mod $arguments {
            #[allow(clippy::wildcard_imports, reason = "the kinds of the table, in one list above")]
            use super::*;
            #[allow(unused_imports, clippy::wildcard_imports, reason = "not every thread serves every kind")]
            use handle::*;

            $(
                #[derive(Debug)]
                pub(crate) struct $name$(<$life>)? {
                    $(pub(crate) $p: <$ty as Resolve>::Owned,)*
                }
            )+
        }

        $(#[$note])*
        #[derive(Debug)]
        #[allow(non_camel_case_types, reason = "the names of the table")]
        pub(crate) enum $call<$($all)?> {
            $($name($arguments::$name$(<$life>)?),)+
        }

        /// The thread that serves the calls.
        pub(crate) trait $thread: $($area +)+ {
            /// Is called after a call is served, before its answer is published.
            fn served(&mut self) {}

            /// Serves a call and publishes its answer.
            fn serve(&mut self, session: &Session, to: ReplyTo, caller: $caller, call: $call) {
                match call {
                    $($call::$name(args) => {
                        let result = self.$name(caller, args);
                        self.served();
                        conclude!($class session to result);
                    })+
                }
            }
        }
    };
}

macro_rules! threads {
    (inline { $($inline:tt)+ } launch { $($launch:tt)+ } stream { $($stream:tt)+ } quick { $($quick:tt)+ } memory { $($memory:tt)+ }
        module { $($module:tt)+ } image { $($image:tt)+ }) => {
        methods! { ServeMemory(Option<GuestContext>), memory; $($quick)+ $($memory)+ }
        methods! { ServeModules(ModuleCaller), module; $($module)+ }
        methods! { ServeImages(ModuleCaller), module; $($image)+ }
        calls! {
            /// A call that the memory helper serves.
            memory, MemoryCall<>, MemoryThread(Option<GuestContext>): ServeMemory;
            $($quick)+ $($memory)+
        }
        calls! {
            /// A call that the module helper serves.
            module, ModuleCall<'a>, ModuleThread(ModuleCaller): ServeModules ServeImages;
            $($module)+ $($image)+
        }
    };
}
sluice_protocol::for_each_wire_call!(threads);

/// The context of a call for the module helper, with its device.
pub(crate) type ModuleCaller = Option<(ContextRef, i32)>;

/// A job for the memory helper.
#[derive(Debug)]
pub(crate) enum MemoryJob {
    /// A call of the guest, and the caller's context.
    Call { to: ReplyTo, caller: Option<GuestContext>, call: MemoryCall },
    /// Makes or retains a context.
    ContextCreate { to: ReplyTo, id: Id<handle::Context>, device: i32, flags: u32, primary: bool, slot: u32 },
    /// Ends a context with its allocations.
    ContextDestroy { to: ReplyTo, context: GuestContext, allocations: Vec<u64> },
    /// The streams have passed the frees of these allocations.
    FreeAll(Vec<u64>),
    /// The guest's own number of its process.
    Hello { process: u32 },
    /// The arbiter recalls memory, or the dispatcher has changed the idle bytes.
    TendIdle,
    /// Drops the sender: another thread waits until all earlier jobs are done.
    Settle(SyncSender<()>),
    /// Pins an arena that is mapped.
    Adopt { slot: u32, mapped: MappedResource },
    /// Unpins and unmaps an arena.
    Detach { arena: Arc<Arena> },
}

/// A job for the module helper.
#[derive(Debug)]
pub(crate) enum ModuleJob {
    /// A call of the guest. The context is that of the call's object, or else the caller's; with it comes the caller's device.
    Call { to: ReplyTo, caller: ModuleCaller, call: ModuleCall<'static> },
    /// Makes, changes or destroys an executable graph.
    Graph(Box<GraphJob>),
    /// Passes the end of a context on to the memory helper, after all calls about its modules.
    ContextDestroy { to: ReplyTo, context: GuestContext, allocations: Vec<u64> },
    /// Passes the detaching of an arena on to the memory helper, after every image in the arena is copied.
    Detach { arena: Arc<Arena> },
}

/// A job about an executable graph.
#[derive(Debug)]
pub(crate) enum GraphJob {
    /// Makes an executable, with the caller's context as the current one.
    Make {
        to: ReplyTo,
        id: Id<handle::GraphExecutable>,
        serial: GraphSerial,
        flags: u32,
        plan: GraphPlan,
        caller: Option<GuestContext>,
    },
    /// Replaces the work of one node.
    SetWork {
        to: ReplyTo,
        id: Id<handle::GraphExecutable>,
        serial: GraphSerial,
        path: Vec<u32>,
        enabled: bool,
        work: GraphWork,
        uses: GraphUses,
    },
    /// Replaces the work of all nodes.
    Update {
        to: ReplyTo,
        id: Id<handle::GraphExecutable>,
        serial: GraphSerial,
        plan: GraphPlan,
        changes: GraphChanges,
    },
    /// Destroys an executable.
    Destroy { serial: GraphSerial },
}

/// The answer to a call that makes an executable graph.
pub(crate) fn graph_answer(made: Result<(), GraphRefusal>) -> wire::graph_instantiate::Reply {
    let (error, node) = made.map_or_else(|refused| (refused.code, refused.node), |()| (0, None));
    wire::graph_instantiate::Reply { error, node: node.unwrap_or(graph::NO_NODE) }
}

/// Publishes the answer to a call that makes an executable graph.
pub(crate) fn answer_graph_instantiate(session: &Session, to: ReplyTo, made: Result<(), GraphRefusal>) {
    respond(session, to, Ok(graph_answer(made)), |reply, writer| reply.put(writer));
}

/// Publishes the answer to a call that updates an executable graph.
pub(crate) fn answer_graph_update(session: &Session, to: ReplyTo, updated: Result<(), GraphRefusal>) {
    let wire::graph_instantiate::Reply { error, node } = graph_answer(updated);
    let reply = wire::graph_update::Reply { error, node };
    respond(session, to, Ok(reply), |reply, writer| reply.put(writer));
}

/// Publishes the answer of a job: the fields that `put` appends, or a failure.
fn respond<R>(
    session: &Session,
    to: ReplyTo,
    result: Result<R, Code>,
    put: impl FnOnce(&R, &mut Writer<'_>) -> Result<(), FieldError>,
) {
    match result {
        Ok(reply) => {
            let mut buffer = [0; limits::REPLY_BYTES];
            let mut writer = Writer::new(&mut buffer);
            let written = put(&reply, &mut writer);
            debug_assert!(written.is_ok(), "answers are bounded by their types");
            let length = writer.length();
            session.answer(to, 0, buffer.get(..length).unwrap_or_default());
        }
        Err(failed) => session.answer(to, failed, &[]),
    }
}
