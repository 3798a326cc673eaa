//! `sluice-inventory`: what the driver's management library (NVML) knows, for `sluiced` and the arbiters.
//!
//! It holds the library so that nobody else has to: NVML can hang for minutes, or for good, when a GPU misbehaves. So
//! nothing may wait for this process without a limit; `sluiced` kills it when it does not answer and starts another.
//! It keeps no state that would be missed: every answer is asked of the library when it is needed, and a process is
//! called gone only after the driver has just said so.
//!
//! From the outside in: [`mod@serve`] answers on sockets, [`changes`] makes and unmakes instances and [`xid`] waits for errors
//! of devices, on threads of their own, and [`nvml`] is the library. It never starts a program, opens no network, and
//! sees nothing that a guest wrote. Which instance is to go is decided by `sluiced`; here only one that is exactly as
//! `sluiced` describes it is unmade.

mod changes;
mod nvml;
mod serve;
mod xid;

pub use nvml::{LoadError, Nvml};
pub use serve::{ServeError, serve};
