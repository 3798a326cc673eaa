//! Execution: lane-wise operations, memory, warps, blocks.
//!
//! The pool calls `worker` with a launch; the lowering takes the handlers of instructions from here. This folder owns the state
//! of a launch from its first block to its last: `grid`, then `cta` and `warp`, `interp` over `mem`, `matrix` and the lanes. It
//! never reads PTX text or a file of the host, and accesses memory only in ranges that [`Memory`](crate::Memory) returns.

pub(crate) mod alu;
pub(crate) mod atomic;
pub(crate) mod cta;
pub(crate) mod dispatch;
mod found;
mod fragment;
pub(crate) mod grid;
pub(crate) mod host;
pub(crate) mod image;
pub(crate) mod interp;
pub(crate) mod lanes;
pub(crate) mod machine;
pub(crate) mod matrix;
pub(crate) mod mbarrier;
pub(crate) mod mem;
pub(crate) mod num;
mod together;
pub(crate) mod warp;
pub(crate) mod worker;

use crate::api::{FaultKind, LOCAL_WINDOW};

/// First generic address of kernel parameters: the upper half of the local window.
pub(crate) const PARAM_WINDOW: u64 = LOCAL_WINDOW.start + (LOCAL_WINDOW.end - LOCAL_WINDOW.start) / 2;

/// A fault without its location.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fail {
    pub(crate) kind: FaultKind,
    pub(crate) lane: usize,
    pub(crate) address: u64,
}

impl Fail {
    pub(crate) fn new(kind: FaultKind, lane: usize, address: u64) -> Fail {
        Fail { kind, lane, address }
    }
}

macro_rules! specials {
    ($($variant:ident $name:literal $part:literal;)*) => {
        /// A special register.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub(crate) enum Special { $($variant),* }
        impl Special {
            pub(crate) const ALL: &'static [Special] = &[$(Special::$variant),*];
            /// Parses a name and its component.
            pub(crate) fn parse(name: &str, part: &str) -> Option<Special> {
                match (name, part) {
                    $(($name, $part) => Some(Special::$variant),)*
                    _ => None,
                }
            }
        }
    };
}

specials! {
    TidX "%tid" "x"; TidY "%tid" "y"; TidZ "%tid" "z"; TidW "%tid" "w";
    NtidX "%ntid" "x"; NtidY "%ntid" "y"; NtidZ "%ntid" "z"; NtidW "%ntid" "w";
    CtaidX "%ctaid" "x"; CtaidY "%ctaid" "y"; CtaidZ "%ctaid" "z"; CtaidW "%ctaid" "w";
    NctaidX "%nctaid" "x"; NctaidY "%nctaid" "y"; NctaidZ "%nctaid" "z"; NctaidW "%nctaid" "w";
    LaneId "%laneid" ""; WarpId "%warpid" ""; NWarpId "%nwarpid" "";
    SmId "%smid" ""; NSmId "%nsmid" ""; GridId "%gridid" "";
    MaskEq "%lanemask_eq" ""; MaskLe "%lanemask_le" ""; MaskLt "%lanemask_lt" "";
    MaskGe "%lanemask_ge" ""; MaskGt "%lanemask_gt" "";
    Clock "%clock" ""; ClockHi "%clock_hi" ""; Clock64 "%clock64" "";
    GlobalTimer "%globaltimer" ""; GlobalTimerLo "%globaltimer_lo" ""; GlobalTimerHi "%globaltimer_hi" "";
    EnvReg1 "%envreg1" ""; EnvReg2 "%envreg2" ""; EnvReg0 "%envreg0" ""; EnvReg3 "%envreg3" "";
    TotalShared "%total_smem_size" ""; DynamicShared "%dynamic_smem_size" ""; AggrShared "%aggr_smem_size" "";
}

impl Special {
    /// The row of [`crate::code_pages::WarpThreads`] with the value.
    pub(crate) fn thread_axis(self) -> Option<usize> {
        Some(match self {
            Special::TidX => 0,
            Special::TidY => 1,
            Special::TidZ => 2,
            Special::LaneId => 3,
            _ => return None,
        })
    }

    /// True if all threads of a launch read one value, during the whole launch.
    pub(crate) fn uniform(self) -> bool {
        use Special::{
            AggrShared, CtaidW, DynamicShared, EnvReg0, EnvReg1, EnvReg2, EnvReg3, GridId, NSmId, NWarpId,
            NctaidW, NctaidX, NctaidY, NctaidZ, NtidW, NtidX, NtidY, NtidZ, TidW, TotalShared,
        };
        matches!(
            self,
            NtidX
                | NtidY
                | NtidZ
                | NctaidX
                | NctaidY
                | NctaidZ
                | TidW
                | NtidW
                | CtaidW
                | NctaidW
                | EnvReg0
                | EnvReg1
                | EnvReg2
                | EnvReg3
                | GridId
                | NSmId
                | NWarpId
                | TotalShared
                | DynamicShared
                | AggrShared
        )
    }
}
