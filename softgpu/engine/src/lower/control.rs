//! The lowering of branches, calls, barriers and warp operations.

use super::{FunctionName, Lower, Modifiers, Res, Symbol};
use crate::exec::alu;

use crate::exec::warp::{BarrierKind, ReduxOp, ShflMode, VoteMode};
use crate::ir::{Argument, Builtin, CallSite, Op, Target, flag};
use crate::ptx::{Instruction, Operand, Prototype, Space, Ty};
use crate::regs::NONE;

impl<'a> Lower<'a, '_> {
    /// Lowers an instruction of control flow or of the warp. Returns false for all others.
    pub(super) fn control(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>) -> Res<bool> {
        match inst.opcode {
            "bra" => {
                m.take("uni");
                let [Operand::Name(name)] = inst.operands.as_slice() else {
                    return self.fail("takes a label");
                };
                let Some(id) = self.label(name) else { return self.fail(format!("unknown label {name}")) };
                self.fixups.push((self.code.insts.len(), id, name));
                let i = self.inst(Op::Bra, Ty::B32);
                self.emit(i);
            }
            "brx" => {
                if !m.take("idx") {
                    return self.fail(".idx is missing");
                }
                m.take("uni");
                let [index, Operand::Name(table)] = inst.operands.as_slice() else {
                    return self.fail("takes 2 operands");
                };
                let a = self.src(index, Ty::U32)?;
                let Some(targets) = self.branch_tables.get(table).cloned() else {
                    return self.fail(format!("unknown table {table}"));
                };
                let mut ids = Vec::new();
                for name in targets {
                    let Some(id) = self.label(name) else {
                        return self.fail(format!("unknown label {name}"));
                    };
                    ids.push(id);
                }
                let mut i = self.inst(Op::Brx, Ty::B32);
                i.a = a;
                i.imm = i64::try_from(self.code.tables.len()).unwrap_or(0);
                self.code.tables.push(ids);
                self.emit(i);
            }
            "ret" | "exit" => {
                m.take("uni");
                if !inst.operands.is_empty() {
                    return self.fail("takes no operands");
                }
                let op = if inst.opcode == "exit" || self.entry { Op::Exit } else { Op::Ret };
                let i = self.inst(op, Ty::B32);
                self.emit(i);
            }
            "trap" | "brkpt" => {
                let i = self.inst(Op::Trap, Ty::B32);
                self.emit(i);
            }
            "nanosleep" => {
                let [t] = self.operands(inst)?;
                self.src(t, Ty::U32)?;
                let i = self.inst(Op::Sleep, Ty::B32);
                self.emit(i);
            }
            "call" => self.call(inst, m)?,
            "bar" | "barrier" => self.barrier(inst, m)?,
            "membar" | "fence" => {
                for word in ["gl", "proxy", "alias", "async", "mbarrier_init", "tensormap::generic"] {
                    m.take(word);
                }
                m.other.retain(|w| {
                    !w.starts_with("proxy") && !w.starts_with("async") && !w.starts_with("sync_restrict")
                });
                let i = self.inst(Op::Fence, Ty::B32);
                self.emit(i);
            }
            "shfl" => self.shfl(inst, m)?,
            "vote" => {
                if !m.take("sync") {
                    return self.fail(".sync is missing: the form without it does not exist on this device");
                }
                let mode = m.find(|w| {
                    Some(match w {
                        "all" => VoteMode::All,
                        "any" => VoteMode::Any,
                        "uni" => VoteMode::Uni,
                        "ballot" => VoteMode::Ballot,
                        _ => return None,
                    })
                });
                let Some(mode) = mode else { return self.fail("a mode is missing") };
                let [d, p, mask] = self.operands(inst)?;
                let (a, negated) = self.pred(p)?;
                let b = self.src(mask, Ty::B32)?;
                let d = self.dst(d, if mode == VoteMode::Ballot { Ty::B32 } else { Ty::Pred })?;
                let mut i = self.inst(Op::Vote, Ty::B32);
                (i.d, i.a, i.b, i.sub) = (d, a, b, mode as u8);
                i.flags |= if negated { flag::NOT_C } else { 0 };
                self.emit(i);
            }
            "match" => {
                if !m.take("sync") {
                    return self.fail(".sync is missing");
                }
                let all = m.take("all");
                if !all && !m.take("any") {
                    return self.fail("a mode is missing");
                }
                let ty = self.one_type(m)?;
                let [d, a, mask] = self.operands(inst)?;
                let (d, e) = self.with_predicate(d, Ty::B32)?;
                let a = self.src(a, ty)?;
                let b = self.src(mask, Ty::B32)?;
                let mut i = self.inst(Op::Match, ty);
                (i.d, i.e, i.a, i.b, i.sub) = (d, e, a, b, u8::from(all));
                self.emit(i);
            }
            "redux" => {
                if !m.take("sync") {
                    return self.fail(".sync is missing");
                }
                let Some(op) = m.find(ReduxOp::parse) else { return self.fail("an operation is missing") };
                let ty = self.one_type(m)?;
                if ty.bytes() != 4 || ty.float() {
                    return self.unsupported("not supported for this type");
                }
                let [d, a, mask] = self.operands(inst)?;
                let (a, b) = (self.src(a, ty)?, self.src(mask, Ty::B32)?);
                let d = self.dst(d, ty)?;
                let mut i = self.inst(Op::Redux, ty);
                (i.d, i.a, i.b, i.sub) = (d, a, b, op as u8);
                self.emit(i);
            }
            "activemask" => {
                let [d] = self.operands(inst)?;
                let d = self.dst(d, Ty::B32)?;
                let mut i = self.inst(Op::ActiveMask, Ty::B32);
                i.d = d;
                self.emit(i);
            }
            "cp" => self.copy_async(inst, m)?,
            "mbarrier" => self.mbarrier(inst, m)?,
            "elect" => self.elect(inst, m)?,
            "griddepcontrol" => {
                // A launch begins after its predecessor has ended, so there is nothing to wait for.
                if !(m.take("wait") || m.take("launch_dependents")) || !inst.operands.is_empty() {
                    return self.fail("takes .wait or .launch_dependents, and no operands");
                }
                let i = self.inst(Op::Nop, Ty::B32);
                self.emit(i);
            }
            "pmevent" => {
                let i = self.inst(Op::Nop, Ty::B32);
                self.emit(i);
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Parses `d|p`, or `d` alone.
    fn with_predicate(&mut self, operand: &Operand<'a>, ty: Ty) -> Res<(u32, u32)> {
        match operand {
            Operand::Pair(d, p) => {
                let d = self.dst(&Operand::Name(d), ty)?;
                let p = if *p == "_" { NONE } else { self.dst(&Operand::Name(p), Ty::Pred)? };
                Ok((d, p))
            }
            other => Ok((self.dst(other, ty)?, NONE)),
        }
    }

    fn shfl(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>) -> Res<()> {
        if !m.take("sync") {
            return self.fail(".sync is missing: the form without it does not exist on this device");
        }
        let mode = m.find(|w| {
            Some(match w {
                "up" => ShflMode::Up,
                "down" => ShflMode::Down,
                "bfly" => ShflMode::Butterfly,
                "idx" => ShflMode::Index,
                _ => return None,
            })
        });
        let Some(mode) = mode else { return self.fail("a mode is missing") };
        let ty = self.one_type(m)?;
        if ty.bytes() != 4 {
            return self.fail("only defined for 32 bits");
        }
        let [d, a, b, c, mask] = self.operands(inst)?;
        let (d, e) = self.with_predicate(d, Ty::B32)?;
        let (a, b, c) = (self.src(a, Ty::B32)?, self.src(b, Ty::B32)?, self.src(c, Ty::B32)?);
        let mask = self.src(mask, Ty::B32)?;
        let mut i = self.inst(Op::Shfl, Ty::B32);
        (i.d, i.e, i.a, i.b, i.c, i.sub) = (d, e, a, b, c, mode as u8);
        i.imm = i64::from(mask);
        self.emit(i);
        Ok(())
    }

    fn barrier(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>) -> Res<()> {
        if m.take("warp") {
            m.take("sync");
            let [mask] = self.operands(inst)?;
            let a = self.src(mask, Ty::B32)?;
            let mut i = self.inst(Op::WarpBarrier, Ty::B32);
            i.a = a;
            self.emit(i);
            return Ok(());
        }
        if m.take("cluster") || inst.modifiers.contains(&"cluster") {
            return self.unsupported("clusters do not exist on this device");
        }
        m.take("aligned");
        let mut sources = inst.operands.as_slice();
        let (mut d, mut c, mut negated) = (NONE, 0, false);
        let mut ty = Ty::B32;
        let kind = if m.take("sync") {
            BarrierKind::Sync
        } else if m.take("arrive") {
            BarrierKind::Arrive
        } else if m.take("red") {
            let kind = m.find(|w| {
                Some(match w {
                    "popc" => BarrierKind::Popc,
                    "and" => BarrierKind::And,
                    "or" => BarrierKind::Or,
                    _ => return None,
                })
            });
            let Some(kind) = kind else { return self.fail("an operation is missing") };
            ty = if kind == BarrierKind::Popc { Ty::B32 } else { Ty::Pred };
            let [to, rest @ .., p] = sources else { return self.fail("operands are missing") };
            (c, negated) = self.pred(p)?;
            d = self.dst(to, ty)?;
            sources = rest;
            kind
        } else {
            return self.fail("a kind is missing");
        };
        let (a, b) = match sources {
            [a] if kind != BarrierKind::Arrive => (self.src(a, Ty::U32)?, NONE),
            [a, b] => (self.src(a, Ty::U32)?, self.src(b, Ty::U32)?),
            _ => return self.fail("wrong number of operands"),
        };
        if matches!(sources.first(), Some(Operand::Int(number)) if *number > 15) {
            return self.fail("barriers have the numbers 0 to 15");
        }
        if matches!(sources.get(1), Some(Operand::Int(threads)) if !threads.is_multiple_of(32)) {
            return self.fail("whole warps take part in a barrier");
        }
        let mut i = self.inst(Op::Barrier, ty);
        (i.d, i.a, i.b, i.c, i.sub) = (d, a, b, c, kind as u8);
        i.flags |= if negated { flag::NOT_C } else { 0 };
        self.emit(i);
        Ok(())
    }

    fn copy_async(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>) -> Res<()> {
        if !m.take("async") || m.other.contains(&"reduce") {
            return self.unsupported("reductions in bulk are not supported");
        }
        if m.take("bulk") {
            return self.copy_in_bulk(inst, m);
        }
        if m.take("mbarrier") {
            return self.copies_arrive(inst, m);
        }
        if m.take("commit_group") || m.take("wait_all") {
            let i = self.inst(Op::Nop, Ty::B32);
            self.emit(i);
            return Ok(());
        }
        if m.take("wait_group") {
            let [_count] = self.operands(inst)?;
            let i = self.inst(Op::Nop, Ty::B32);
            self.emit(i);
            return Ok(());
        }
        if !m.other.is_empty() {
            return self.unsupported("this form of cp.async is not supported");
        }
        if m.space != Some(Space::Shared) || m.second_space != Some(Space::Global) {
            return self.fail("copies go from global to shared memory");
        }
        let list = inst.operands.as_slice();
        let [to, from, Operand::Int(size), rest @ ..] = list else {
            return self.fail("takes 3 or 4 operands");
        };
        if !matches!(size, 4 | 8 | 16) {
            return self.fail("copies have 4, 8 or 16 bytes");
        }
        let (a, imm, flags) = self.address(to, Space::Shared)?;
        let (b, from_imm, from_flags) = self.address(from, Space::Global)?;
        if from_flags & flag::ADDR32 != 0 {
            return self.fail("a global address has 64 bits");
        }
        // The optional source size bounds the bytes that are read; the rest is zero.
        let c = match rest.first() {
            Some(Operand::Name(name))
                if matches!(self.lookup(name)?, Some(FunctionName::Register { ty: Ty::Pred, .. })) =>
            {
                // A source that is ignored has no bytes.
                let (p, negated) = self.pred(&Operand::Name(name))?;
                let (none, all) = (self.bits(0, false)?, self.bits(*size, false)?);
                let t = self.register(Ty::B32)?;
                let flags = if negated { flag::NOT_C } else { 0 };
                self.alu(alu::selection(), Ty::B32, t, [none, all, p], flags);
                t
            }
            Some(n) if rest.len() == 1 && self.is_narrow(n)? => self.src(n, Ty::U32)?,
            _ => NONE,
        };
        let mut i = self.inst(Op::CpAsync, Ty::B8);
        (i.a, i.b, i.c, i.imm) = (a, b, c, imm);
        i.n = u8::try_from(*size).unwrap_or(16);
        i.flags |= flags;
        i.e = u32::try_from(self.code.extra.len()).unwrap_or(u32::MAX);
        let bits = from_imm.cast_unsigned();
        #[expect(clippy::cast_possible_truncation, reason = "the offset is stored as two halves")]
        self.code.extra.extend([bits as u32, (bits >> 32) as u32]);
        self.emit(i);
        Ok(())
    }

    fn is_narrow(&mut self, operand: &Operand<'a>) -> Res<bool> {
        Ok(match operand {
            Operand::Int(_) => true,
            Operand::Name(name) => {
                matches!(self.lookup(name)?, Some(FunctionName::Register { ty, .. }) if ty.bytes() == 4)
            }
            _ => false,
        })
    }

    // ---- calls ----

    fn call(&mut self, inst: &Instruction<'a>, m: &mut Modifiers<'a>) -> Res<()> {
        m.take("uni");
        let mut list = inst.operands.as_slice();
        let results: &[Operand<'a>] = match list {
            [Operand::List(r), rest @ ..] => {
                list = rest;
                r
            }
            _ => &[],
        };
        let [Operand::Name(callee), rest @ ..] = list else { return self.fail("a function is missing") };
        let (arguments, proto): (&[Operand<'a>], Option<&str>) = match rest {
            [] => (&[], None),
            [Operand::List(a)] => (a, None),
            [Operand::List(a), Operand::Name(p)] => (a, Some(p)),
            [Operand::Name(p)] => (&[], Some(p)),
            _ => return self.fail("malformed"),
        };
        if let Some(name) = proto.filter(|name| !self.prototypes.contains_key(name)) {
            return self.unknown(name);
        }
        let (target, signature) = match self.lookup(callee)? {
            Some(FunctionName::Register { slot, ty }) if ty.bytes() == 8 => {
                let signature = proto.and_then(|p| self.prototypes.get(p)).cloned();
                (Target::Slot(slot), signature)
            }
            Some(_) => return self.fail(format!("{callee} cannot be called")),
            None => match self.symbols.names.get(callee) {
                Some(Symbol::Function(index)) => {
                    (Target::Function(*index), self.symbols.signatures.get(*index as usize).cloned())
                }
                Some(_) => return self.fail(format!("{callee} cannot be called")),
                None => return self.unknown(callee),
            },
        };
        let arguments = self.arguments(arguments, signature.as_ref().map(|s| s.params.as_slice()), false)?;
        let results = self.arguments(results, signature.as_ref().map(|s| s.returns.as_slice()), true)?;
        let target = match builtin(callee) {
            Some(b) if matches!(target, Target::Function(_)) && !self.symbols.defined(callee) => {
                Target::Builtin(b)
            }
            _ => target,
        };
        let mut i =
            self.inst(if matches!(target, Target::Slot(_)) { Op::CallIndirect } else { Op::Call }, Ty::B64);
        if let Target::Slot(slot) = target {
            i.a = slot;
        }
        i.imm = i64::try_from(self.code.calls.len()).unwrap_or(0);
        self.code.calls.push(CallSite { target, arguments, results });
        self.emit(i);
        Ok(())
    }

    fn arguments(&mut self, list: &[Operand<'a>], sizes: Option<&[u64]>, result: bool) -> Res<Vec<Argument>> {
        if let Some(sizes) = sizes
            && sizes.len() != list.len()
        {
            return self.fail("the number of arguments differs from the declaration");
        }
        let mut out = Vec::new();
        for (n, operand) in list.iter().enumerate() {
            let size = sizes.and_then(|s| s.get(n)).copied();
            let argument = match operand {
                Operand::Name("_") if result => Argument::Sink,
                Operand::Name(name) => match self.lookup(name)? {
                    Some(FunctionName::Words { first, bytes }) => Argument::Words(first, bytes.div_ceil(4)),
                    Some(FunctionName::Register { slot, ty }) if ty != Ty::Pred => {
                        if ty.bytes() == 8 {
                            Argument::Wide(slot)
                        } else {
                            Argument::Narrow(slot)
                        }
                    }
                    _ if result => return self.fail(format!("{name} cannot take a result")),
                    _ => self.immediate_argument(operand, size)?,
                },
                _ if result => return self.fail("a result must be a parameter or register"),
                other => self.immediate_argument(other, size)?,
            };
            out.push(argument);
        }
        Ok(out)
    }

    fn immediate_argument(&mut self, operand: &Operand<'a>, size: Option<u64>) -> Res<Argument> {
        Ok(if size == Some(8) {
            Argument::Wide(self.src(operand, Ty::B64)?)
        } else {
            Argument::Narrow(self.src(operand, Ty::B32)?)
        })
    }
}

/// The functions that the host provides.
pub(crate) fn builtin(name: &str) -> Option<Builtin> {
    Some(match name {
        "vprintf" => Builtin::Printf,
        "__assertfail" => Builtin::AssertFail,
        "malloc" => Builtin::Malloc,
        "free" => Builtin::Free,
        "cudaGraphSetConditional" => Builtin::SetConditional,
        _ => return None,
    })
}

/// The signature of a function for its callers.
pub(crate) fn signature(f: &crate::ptx::Function<'_>) -> Prototype {
    let sizes = |v: &[crate::ptx::Variable<'_>]| v.iter().map(|p| p.size).collect();
    Prototype { returns: sizes(&f.returns), params: sizes(&f.params) }
}
