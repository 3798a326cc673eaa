//! Custody of the device memory of one placement unit.
//!
//! The arbiter takes all of the unit's memory in chunks, lends them to workers as descriptors, counts what each VM has,
//! takes chunks back when their holders say so or die, scrubs them, and lends them again. It owns the driver's handles of
//! all chunks; it must never map a guest's memory or look at a guest's byte, and believes nothing a worker says.
//!
//! Rooms, from the inside out:
//! - [`ids`], [`ledger`], [`chunks`]: names, accounts, chunk states. Pure.
//! - [`custody`]: the decisions over them. Pure: told what happened, it says what to do.
//! - [`audit`]: whether sums and states hold together, and agree with the inventory.
//! - [`mod@unit`], [`scrub`]: the driver; and the thread in which everything of it happens that takes time.
//! - [`receipts`]: what says of each scrub that it was done, in files of bounded length.
//! - `booking`: to whom the driver books lent memory, as a probe shows. Pure.
//! - [`tally`]: what workers say they have done, added up. Pure.
//! - `time`: who may submit work, in a thread of its own.
//! - [`page`], `workers`, [`inventory`]: the other parties.
//! - `rounds`: whose turn it is to be served; `closer`: the thread that closes workers' descriptors.
//! - [`server`]: the loop.

pub mod audit;
mod booking;
pub mod chunks;
mod closer;
pub mod custody;
pub mod ids;
pub mod inventory;
pub mod ledger;
pub mod page;
pub mod receipts;
mod rounds;
pub mod scrub;
pub mod server;
mod space;
pub mod tally;
mod time;
pub mod unit;
mod workers;

pub use server::{RunError, run};
