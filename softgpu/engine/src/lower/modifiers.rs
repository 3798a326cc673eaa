//! The modifiers of an opcode, sorted into fields.

use crate::ir::{Round, flag};
use crate::ptx::{Space, Ty};

/// Every modifier of an instruction; modifiers that few instructions have stay in `other`.
#[derive(Clone, Debug)]
pub(crate) struct Modifiers<'a> {
    pub(crate) types: Vec<Ty>,
    pub(crate) round: Option<Round>,
    pub(crate) flags: u32,
    pub(crate) space: Option<Space>,
    /// The second state space of `cp.async.ca.shared.global`.
    pub(crate) second_space: Option<Space>,
    pub(crate) vector: u8,
    pub(crate) cc: bool,
    pub(crate) other: Vec<&'a str>,
}

impl<'a> Modifiers<'a> {
    pub(crate) fn parse(words: &[&'a str]) -> Modifiers<'a> {
        let mut m = Modifiers {
            types: Vec::new(),
            round: None,
            flags: 0,
            space: None,
            second_space: None,
            vector: 1,
            cc: false,
            other: Vec::new(),
        };
        for &word in words {
            if let Some(ty) = Ty::parse(word) {
                m.types.push(ty);
                continue;
            }
            let space = match word {
                "global" => Some(Space::Global),
                "const" => Some(Space::Const),
                "shared" | "shared::cta" => Some(Space::Shared),
                "local" => Some(Space::Local),
                "param" | "param::entry" | "param::func" => Some(Space::Param),
                _ => None,
            };
            if let Some(space) = space {
                if m.space.is_none() {
                    m.space = Some(space)
                } else {
                    m.second_space = Some(space)
                }
                continue;
            }
            match word {
                "rn" => m.round = Some(Round::Rn),
                "rz" => m.round = Some(Round::Rz),
                "rm" => m.round = Some(Round::Rm),
                "rp" => m.round = Some(Round::Rp),
                "rna" => m.round = Some(Round::Rna),
                "rni" | "rzi" | "rmi" | "rpi" => {
                    m.flags |= flag::INTEGRAL;
                    m.round = Some(match word {
                        "rni" => Round::Rn,
                        "rzi" => Round::Rz,
                        "rmi" => Round::Rm,
                        _ => Round::Rp,
                    });
                }
                "ftz" => m.flags |= flag::FTZ,
                "sat" | "satfinite" => m.flags |= flag::SAT,
                "hi" => m.flags |= flag::HI,
                "lo" => {}
                "wide" => m.flags |= flag::WIDE,
                "approx" | "full" => m.flags |= flag::APPROX,
                "NaN" => m.flags |= flag::NAN,
                "relu" => m.flags |= flag::RELU,
                "xorsign" => m.flags |= flag::XORSIGN,
                "abs" => m.flags |= flag::ABS,
                "oob" => m.flags |= flag::OOB,
                "clamp" => m.flags |= flag::CLAMP,
                "shiftamt" => m.flags |= flag::SHIFT_AMOUNT,
                "cc" => m.cc = true,
                "v2" => m.vector = 2,
                "v4" => m.vector = 4,
                "v8" => m.vector = 8,
                "volatile" | "relaxed" | "mmio" => m.flags |= flag::ATOMIC,
                "acquire" | "release" | "acq_rel" | "sc" => m.flags |= flag::ATOMIC | flag::ORDERED,
                // All memory is coherent with the host in every scope.
                "cta" | "gpu" | "sys" | "cluster" => {}
                // Cache operators and cache hints.
                "ca" | "cg" | "cs" | "lu" | "cv" | "wb" | "wt" | "nc" | "weak" | "noftz" => {}
                // A second time they mean the same.
                "uni" | "sync" if m.other.contains(&word) => {}
                _ if word.starts_with("L1::") || word.starts_with("L2::") => {}
                _ => m.other.push(word),
            }
        }
        m
    }

    /// Removes a word from `other`. Returns true if it was there.
    pub(crate) fn take(&mut self, word: &str) -> bool {
        let at = self.other.iter().position(|w| *w == word);
        if let Some(at) = at {
            self.other.remove(at);
        }
        at.is_some()
    }

    /// Removes and returns the first word of `other` that `f` accepts.
    pub(crate) fn find<T>(&mut self, f: impl Fn(&str) -> Option<T>) -> Option<T> {
        let at = self.other.iter().position(|w| f(w).is_some())?;
        f(self.other.remove(at))
    }

    pub(crate) fn ty(&self) -> Option<Ty> {
        self.types.first().copied()
    }

    pub(crate) fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }
}
