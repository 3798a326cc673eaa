//! Version 1 of the API: requests and answers.
//!
//! The daemon, the command line, `xtask` and the tests use it. It owns the form of every request and answer, and the description of the
//! API is made from it. It must never decide about a request: the daemon does.
//!
//! Fields may be added. They are never removed or given another meaning; such a change makes another version.

use std::{fmt, str::FromStr};

use serde::{
    Deserialize as _, Serialize as _,
    de::{self, IntoDeserializer as _},
};

mod capacity;
mod events;
mod health;
mod host;
mod settings;
mod sizes;
mod suggestions;
mod tree;
mod units;
mod usage;
mod vms;

pub use self::{
    capacity::*, events::*, health::*, host::*, settings::*, sizes::*, suggestions::*, tree::*, units::*,
    usage::*, vms::*,
};

/// Implements `Display` and `FromStr` for enumerations, with the words of the API.
macro_rules! words {
    ($($name:ident),* $(,)?) => {$(
        impl fmt::Display for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.serialize(formatter)
            }
        }

        impl FromStr for $name {
            type Err = de::value::Error;

            fn from_str(word: &str) -> Result<Self, Self::Err> {
                Self::deserialize(word.into_deserializer())
            }
        }
    )*};
}

words! {
    ArenaPolicy, FenceStep, FencedBy, GpuState, Isolation, Policy, Priority, Reason, Rebalance, UnitKind, UnitState, VmState,
}
