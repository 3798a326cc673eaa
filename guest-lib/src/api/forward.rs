//! The functions that only make one wire call, generated from their rows in the table of C functions.
//!
//! A row defines which argument becomes which parameter of the call, and which result goes to which place. Handles become ids of
//! the session; numbers of the C API become those of the wire.

use crate::{
    arguments::{Argument, Call, Out},
    error::{Error, Result},
    process::{self, ProcessState},
};
use core::ffi::{c_int, c_uint};
use sluice_protocol::{
    calls::wire,
    handle::{Function, Id},
};

/// A handle of the session as C code holds it.
type Handle = u64;

/// An argument that becomes a parameter `P`.
trait Pass<P> {
    fn pass(self, process: &ProcessState) -> Result<P>;
}

macro_rules! same {
    ($($from:ty => $to:ty),+) => {$(
        impl Pass<$to> for $from {
            fn pass(self, _: &ProcessState) -> Result<$to> {
                <$to>::try_from(self).map_err(|_| Error::INVALID_VALUE)
            }
        }
    )+};
}
same!(c_uint => u32, c_int => i32, usize => u64, u64 => u64);

impl Pass<Id<Function>> for Handle {
    fn pass(self, process: &ProcessState) -> Result<Id<Function>> {
        // Not held, since the answer may take a while.
        process.modules.functions.resolve(self).map(|function| function.id)
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
    (forward $name:ident ($($p:ident: $ty:ty),*) => $wire:ident ($($to:ident: $from:tt),*) -> ($($result:ident: $into:ident),*)) => {
        pub(crate) fn $name(_: Call, $($p: <$ty as Argument>::Value),*) -> Result {
            let process = process::get()?;
            $($into.required()?;)*
            let call = wire::$wire::Args { $($to: Pass::pass($from, process)?),* };
            let answer = process.session.sync(process.current()?.raw, &call)?;
            let _ = &answer;
            $(deliver($into, answer.$result)?;)*
            Ok(())
        }
    };
    ($by_hand:ident $name:ident $parameters:tt) => {};
}
sluice_protocol::for_each_c_call!(functions);
