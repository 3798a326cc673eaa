//! Custody of the device memory of one placement unit.
//!
//! The arbiter takes all of the unit's memory in chunks, lends them to workers as descriptors, counts the memory of each VM,
//! takes chunks back when their holders give them back or die, scrubs them, and lends them again. It owns the driver's handles
//! of all chunks; it must never map a guest's memory or look at a guest's byte, and trusts no message of a worker.
//!
//! Modules, from the inside out:
//! - [`ids`], [`ledger`], [`chunks`]: names, accounts, chunk states. Pure.
//! - [`custody`]: the decisions over them. Pure: it receives events and returns actions.
//! - [`audit`]: checks that sums and states hold together, and agree with the inventory.
//! - [`mod@unit`], [`scrub`]: the driver; and the thread for all driver work that takes time.
//! - [`receipts`]: the record that each scrub was done, in files of bounded length.
//! - `booking`: the process to which the driver books lent memory, as a probe shows. Pure.
//! - [`usage`]: the sum of the usage that workers report. Pure.
//! - `time`: the right to submit work, in a thread of its own.
//! - [`page`], [`inventory`]: the other parties.
//! - `rounds`: the order in which workers are served.
//! - [`server`]: the loop.
//!
//! Folders from top to bottom: server, custody.

pub mod audit;
mod booking;
pub mod chunks;
pub mod custody;
pub mod ids;
pub mod inventory;
pub mod ledger;
mod measured;
pub mod page;
pub mod receipts;
mod rounds;
pub mod scrub;
pub mod server;
mod space;
mod time;
pub mod unit;
pub mod usage;

pub use server::{RunError, run};
