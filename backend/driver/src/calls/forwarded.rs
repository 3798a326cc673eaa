//! The functions of handles and numbers, generated from their rows in the table of C functions.
//!
//! Each method has the name of its C function. A parameter that C code passes as a pointer is a result here.

#![expect(unused_parens, reason = "most functions have one result")]

use super::Result;
use crate::{Driver, Handle, code};
use core::ffi::{c_int, c_uint};

/// The type of a handle or a number: no pointer and no function may be an argument of a method that is safe.
trait Number {}
impl Number for u64 {}
impl Number for usize {}
impl Number for c_int {}
impl Number for c_uint {}

fn number<T: Number>(argument: impl TryInto<T>) -> Result<T> {
    argument.try_into().map_err(|_| code::INVALID_VALUE)
}

macro_rules! functions {
    ($($(#[doc = $doc:literal])* $id:literal @ $since:literal $class:ident fn $name:ident $parameters:tt
        $(also $($also:ident),+)? $(=> $wire:ident $to:tt -> $into:tt)?;)+) => {
        impl Driver {
            $(function!($class $name $parameters);)+
        }
    };
}

macro_rules! function {
    (scalar $name:ident ($($parameters:tt)*)) => { method!($name [] [] [] $($parameters)*); };
    (forward $name:ident ($($parameters:tt)*)) => { method!($name [] [] [] $($parameters)*); };
    (contextless $name:ident ($($parameters:tt)*)) => { method!($name [] [] [] $($parameters)*); };
    ($other:ident $name:ident $parameters:tt) => {};
}

/// Sorts the parameters into those that the caller passes, results, and arguments of the C function, one after the other.
macro_rules! method {
    ($name:ident [$($in:tt)*] [$($out:tt)*] [$($argument:tt)*] $p:ident: *mut $ty:ty $(, $($rest:tt)*)?) => {
        method!($name [$($in)*] [$($out)* $p: $ty,] [$($argument)* &raw mut $p,] $($($rest)*)?);
    };
    ($name:ident [$($in:tt)*] [$($out:tt)*] [$($argument:tt)*] $p:ident: $ty:ty $(, $($rest:tt)*)?) => {
        method!($name [$($in)* $p: $ty,] [$($out)*] [$($argument)* $p,] $($($rest)*)?);
    };
    ($name:ident [$($in:ident: $from:ty,)*] [$($out:ident: $result:ty,)*] [$($argument:expr,)*]) => {
        #[doc = concat!("`", stringify!($name), "`.")]
        pub fn $name(&self, $($in: impl TryInto<$from>),*) -> Result<($($result),*)> {
            $(let $in: $from = number($in)?;)*
            $(let mut $out: $result = number(0_u8)?;)*
            call!(self.$name($($argument),*))?;
            Ok(($($out),*))
        }
    };
}
sluice_protocol::for_each_c_call!(functions);
