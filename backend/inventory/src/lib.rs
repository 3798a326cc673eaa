//! `sluice-inventory`: the knowledge of the driver's management library (NVML), for `sluiced` and the arbiters.
//!
//! It holds the library so that no other process has to: NVML can hang for minutes, or for ever, when a GPU misbehaves. So
//! no process may wait for this one without a limit; `sluiced` kills it when it does not answer and starts another. It keeps
//! no state that could be lost: it queries the library for every answer when it is needed, and reports a process as gone only
//! after the driver has just reported so.
//!
//! From the outside in: [`mod@serve`] answers on sockets, [`changes`] makes and removes instances and [`xid`] waits for errors
//! of devices, on threads of their own, and [`nvml`] is the library. It never starts a program, opens no network, and sees no
//! data that a guest wrote. `sluiced` chooses the instance to remove; this process removes it only if it is exactly as
//! `sluiced` describes it.

mod changes;
mod nvml;
mod serve;
mod xid;

pub use nvml::{LoadError, Nvml};
pub use serve::{ServeError, serve};
