//! The functions that only make one wire call, generated from their rows in the table of C functions.
//!
//! A row defines which argument becomes which parameter of the call, and which result goes to which place. Handles become ids of
//! the session; numbers of the C API become those of the wire.

use crate::{
    arguments::{Argument, Call, Out},
    error::{Error, Result},
    process::{self, ProcessState},
    state::objects::Plain,
};
use core::ffi::{c_int, c_uint};
use sluice_protocol::{
    calls::wire,
    field::{Mint, Ordinal, Take},
    handle::{self, Id},
};

/// A handle of the session as C code holds it.
type Handle = u64;

/// An argument that becomes a parameter `P`.
trait Pass<P>: Copy {
    /// The parameter, for a call in this context; 0 for none.
    fn pass(self, process: &ProcessState, context: u64) -> Result<P>;

    /// Concludes the call, which the host has served if `done`.
    fn conclude(self, _passed: P, _process: &ProcessState, _done: bool) {}
}

macro_rules! same {
    ($($from:ty => $to:ty),+) => {$(
        impl Pass<$to> for $from {
            fn pass(self, _: &ProcessState, _: u64) -> Result<$to> {
                <$to>::try_from(self).map_err(|_| Error::INVALID_VALUE)
            }
        }
    )+};
}
same!(c_uint => u32, c_int => i32, usize => u64, u64 => u64);

impl Pass<Ordinal> for c_int {
    fn pass(self, process: &ProcessState, _: u64) -> Result<Ordinal> {
        process.devices.get(self).map(|device| Ordinal(device.ordinal))
    }
}

impl Pass<Id<handle::Function>> for Handle {
    fn pass(self, process: &ProcessState, _: u64) -> Result<Id<handle::Function>> {
        // Not held, since the answer may take a while.
        process.modules.functions.resolve(self).map(|function| function.id)
    }
}

macro_rules! plain {
    ($($(#[$doc:meta])* $kind:ident = $tag:literal, $limit:expr;)*) => {$(
        impl Pass<Id<handle::$kind>> for Handle {
            fn pass(self, process: &ProcessState, _: u64) -> Result<Id<handle::$kind>> {
                Plain::of(&process.objects).resolve(self)
            }
        }
    )*};
}
sluice_protocol::for_each_plain_kind!(plain);

impl<K: Plain> Pass<Mint<K>> for Out<Handle> {
    fn pass(self, process: &ProcessState, context: u64) -> Result<Mint<K>> {
        self.required()?;
        K::of(&process.objects).mint(context).map(Mint)
    }

    fn conclude(self, Mint(id): Mint<K>, process: &ProcessState, done: bool) {
        if done {
            K::of(&process.objects).made(id);
            self.set_if_given(id.raw());
        } else {
            K::of(&process.objects).release(id);
        }
    }
}

impl<K: Plain> Pass<Take<K>> for Handle {
    fn pass(self, process: &ProcessState, _: u64) -> Result<Take<K>> {
        K::of(&process.objects).take(self).map(Take)
    }

    fn conclude(self, Take(id): Take<K>, process: &ProcessState, _: bool) {
        K::of(&process.objects).release(id);
    }
}

/// Writes a result to the caller's place.
fn deliver<R, T: Copy + TryFrom<R>>(place: Out<T>, result: R) -> Result {
    place.set(T::try_from(result).map_err(|_| Error::UNKNOWN)?)
}

macro_rules! functions {
    ($($(#[doc = $doc:literal])* $id:literal @ $since:literal $class:ident fn $name:ident $parameters:tt
        $(also $($also:ident),+)? $(=> $wire:ident $to:tt -> $into:tt)?;)+) => {
        $(function!($class $name $parameters $(=> $wire $to -> $into)?);)+
    };
}

macro_rules! function {
    (forward $($row:tt)+) => { forwarded!(|process| Ok(process.current()?.raw), $($row)+); };
    (contextless $($row:tt)+) => { forwarded!(|_| Ok(0), $($row)+); };
    ($by_hand:ident $name:ident $parameters:tt) => {};
}

macro_rules! forwarded {
    ($context:expr, $name:ident ($($p:ident: $ty:ty),*)
        => $wire:ident ($($to:ident: $from:tt),*) -> ($($result:ident: $into:ident),*)) => {
        pub(crate) fn $name(_: Call, $($p: <$ty as Argument>::Value),*) -> Result {
            let process = process::get()?;
            $($into.required()?;)*
            let context: fn(&ProcessState) -> Result<u64> = $context;
            let context = context(process)?;
            let call = wire::$wire::Args { $($to: Pass::pass($from, process, context)?),* };
            let answer = process.session.sync(context, &call);
            $(Pass::conclude($from, call.$to, process, answer.is_ok());)*
            let answer = answer?;
            let _ = &answer;
            $(deliver($into, answer.$result)?;)*
            Ok(())
        }
    };
}
sluice_protocol::for_each_c_call!(functions);
