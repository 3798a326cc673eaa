//! The lowering from the syntax tree to decoded instructions: names become slots, labels become indexes.
//!
//! The load of a module calls it, once for each function. It owns the numbering of slots and labels, and trusts nothing in the
//! text: a function with an instruction that the engine does not execute is refused here, never later.
//!
//! This module makes every slot number that the executor uses, inside the frame whose size is recorded in the [`LoweredCode`]. It checks
//! the width of each operand against the width that the instruction reads, so that no access leaves its frame.

mod combination;
mod comparison;
mod control;
mod data;
mod grammar;
mod image;
mod matrix;
mod mbarrier;
mod memory;
mod modifiers;
mod operands;
mod propagate;
mod requirements;
mod shared;
mod stack;
mod vectors;
mod video;

use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use crate::api::{LOCAL_WINDOW, LoadError, LoadErrorKind, SHARED_WINDOW};
use crate::exec::dispatch::plain;
use crate::exec::{PARAM_WINDOW, alu};
use crate::ir::{Argument, Constant, Handler, Inst, LoweredCode, Op, Round, flag};
use crate::ptx::{Function, Instruction, Language, Operand, Prototype, Space, Statement, Ty, Variable};
use crate::regs::{NONE, UNITS};

pub(crate) use control::signature;
pub(crate) use modifiers::Modifiers;
pub(crate) use shared::{SharedLayout, SharedVariable};

pub(crate) type Res<T> = Result<T, LoadError>;

/// Largest register frame, in units of four bytes: 4,096 slots of 64 bits for 32 lanes are 1 MiB.
const MAX_FRAME_UNITS: u32 = 1 << 22;
/// Maximum nesting of scopes.
const MAX_SCOPES: usize = 256;

/// The meaning of a name of the module.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Symbol {
    Global(u32),
    Shared(SharedVariable),
    /// Dynamic shared memory: follows the static part of the running kernel.
    Dynamic,
    Function(u32),
    /// A texture or surface reference.
    Reference(u32),
    /// Declared but never defined.
    Undefined,
}

/// The names of a unit of the module.
pub(crate) struct Symbols<'a> {
    /// The language of the unit's text.
    pub(crate) language: Language,
    pub(crate) names: HashMap<&'a str, Symbol>,
    /// The signatures of the functions of all units.
    pub(crate) signatures: Rc<Vec<Prototype>>,
    pub(crate) defined: HashSet<&'a str>,
    /// The numbers of variables that functions declare, by line and name.
    pub(crate) nested: HashMap<(u32, &'a str), u32>,
}

impl Symbols<'_> {
    fn defined(&self, name: &str) -> bool {
        self.defined.contains(name)
    }
}

/// The meaning of a name of a function.
#[derive(Clone, Copy, Debug)]
enum FunctionName {
    Register {
        slot: u32,
        ty: Ty,
    },
    /// A family of registers `%r<n>`; each gets a slot at its first use.
    Family {
        id: u32,
        count: u32,
        ty: Ty,
    },
    /// A register of several elements, each in a slot of its own, `units` after the one before.
    Vector {
        first: u32,
        units: u32,
        count: u8,
        ty: Ty,
    },
    /// A parameter of a kernel, in the parameter block.
    Kernel {
        offset: u32,
        size: u32,
    },
    /// A parameter of a function or call: 32-bit words of the frame.
    Words {
        first: u32,
        bytes: u32,
    },
    Local(u32),
    Shared(u32),
    Dynamic,
    /// A variable in global or constant memory, which only this function names.
    Global(u32),
}

/// The lowering of one function.
pub(crate) struct Lower<'a, 's> {
    symbols: &'s Symbols<'a>,
    code: LoweredCode,
    entry: bool,
    scopes: Vec<(u32, HashMap<&'a str, FunctionName>)>,
    next_scope: u32,
    family: u32,
    family_slots: HashMap<(u32, u32), u32>,
    predicates: (u32, u32),
    constants: HashMap<Constant, u32>,
    labels: HashMap<(u32, &'a str), u32>,
    fixups: Vec<(usize, u32, &'a str)>,
    label_at: Vec<u32>,
    branch_tables: HashMap<&'a str, Vec<&'a str>>,
    prototypes: HashMap<&'a str, Prototype>,
    shared: &'s mut SharedLayout,
    guard: (u32, bool),
    line: u32,
    carry: u32,
    /// True if the function has vector registers.
    has_vectors: bool,
}

/// The result of lowering a function.
pub(crate) struct Lowered {
    /// Without instructions if the function is refused.
    pub(crate) code: LoweredCode,
    pub(crate) params: Vec<crate::api::Param>,
    pub(crate) param_bytes: u32,
    /// The reason that the function cannot run, although its text is valid.
    pub(crate) refusal: Option<LoadError>,
}

fn nothing(_: &crate::regs::Frame, _: &Inst, _: u32) {}

impl<'a, 's> Lower<'a, 's> {
    /// Lowers a function with a body.
    pub(crate) fn function(
        f: &Function<'a>,
        symbols: &'s Symbols<'a>,
        shared: &'s mut SharedLayout,
    ) -> Res<Lowered> {
        let mut lower = Lower {
            symbols,
            code: LoweredCode { name: f.name.to_owned(), defined: true, ..LoweredCode::default() },
            entry: f.entry,
            scopes: vec![(0, HashMap::new())],
            next_scope: 1,
            family: 0,
            family_slots: HashMap::new(),
            predicates: (0, 32),
            constants: HashMap::new(),
            labels: HashMap::new(),
            fixups: Vec::new(),
            label_at: Vec::new(),
            branch_tables: HashMap::new(),
            prototypes: HashMap::new(),
            shared,
            guard: (NONE, false),
            line: f.line,
            carry: NONE,
            has_vectors: false,
        };
        let (params, param_bytes) = lower.parameters(f)?;
        let refusal = match f.refusal.clone().map_or_else(|| lower.whole_body(f), Err) {
            Ok(()) => None,
            Err(error) if error.kind == LoadErrorKind::Unsupported => Some(error),
            Err(error) => return Err(error),
        };
        if refusal.is_some() {
            lower.code = LoweredCode { name: f.name.to_owned(), ..LoweredCode::default() };
        }
        Ok(Lowered { code: lower.code, params, param_bytes, refusal })
    }

    fn whole_body(&mut self, f: &Function<'a>) -> Res<()> {
        let body = f.body.as_deref().unwrap_or(&[]);
        self.collect_labels(body)?;
        self.body(body)?;
        self.finish()
    }

    fn fail<T>(&self, message: impl Into<String>) -> Res<T> {
        Err(LoadError { kind: LoadErrorKind::Syntax, line: self.line, message: message.into() })
    }

    fn unsupported<T>(&self, message: impl Into<String>) -> Res<T> {
        Err(LoadError { kind: LoadErrorKind::Unsupported, line: self.line, message: message.into() })
    }

    // ---- emission ----

    fn inst(&self, op: Op, ty: Ty) -> Inst {
        Inst {
            handler: plain(nothing),
            imm: 0,
            guard: self.guard.0,
            d: 0,
            a: 0,
            b: 0,
            c: 0,
            e: NONE,
            flags: if self.guard.1 { flag::NOT } else { 0 },
            line: self.line,
            op,
            ty,
            sty: ty,
            round: Round::Rn,
            space: Space::Generic,
            sub: 0,
            n: 1,
        }
    }

    fn emit(&mut self, inst: Inst) {
        self.code.insts.push(inst);
    }

    /// Emits a lane-wise instruction.
    fn alu(&mut self, handler: Handler, ty: Ty, d: u32, sources: [u32; 3], flags: u32) {
        let mut inst = self.inst(Op::Alu, ty);
        inst.handler = handler;
        inst.d = d;
        [inst.a, inst.b, inst.c] = sources;
        inst.flags |= flags;
        self.emit(inst);
    }

    fn mov(&mut self, d: u32, a: u32, wide: bool) {
        let ty = if wide { Ty::B64 } else { Ty::B32 };
        self.alu(alu::mov(wide), ty, d, [a, 0, 0], flag::COPY);
    }

    fn logic(&mut self, sub: u8, d: u32, a: (u32, bool), b: (u32, bool)) {
        let mut inst = self.inst(Op::Alu, Ty::Pred);
        inst.handler = alu::predicate_logic();
        (inst.d, inst.a, inst.b, inst.sub) = (d, a.0, b.0, sub);
        inst.flags |= if a.1 { flag::CLAMP } else { 0 } | if b.1 { flag::NOT_C } else { 0 };
        self.emit(inst);
    }

    // ---- the function ----

    fn parameters(&mut self, f: &Function<'a>) -> Res<(Vec<crate::api::Param>, u32)> {
        let mut params = Vec::new();
        let mut at = 0u32;
        for p in &f.params {
            self.line = p.line;
            if !f.entry {
                let argument = self.formal(p)?;
                self.code.params.push(argument);
                continue;
            }
            let size = u32::try_from(p.size).ok().filter(|&s| s <= 32768);
            let Some(size) = size else { return self.fail(format!("parameter {} is too large", p.name)) };
            let offset = at.next_multiple_of(p.align.max(1));
            at = offset + size;
            if at > 32768 {
                return self.fail("too many parameters");
            }
            params.push(crate::api::Param { offset, size, align: p.align });
            self.declare(p.name, FunctionName::Kernel { offset, size })?;
        }
        for p in &f.returns {
            self.line = p.line;
            let argument = self.formal(p)?;
            self.code.returns.push(argument);
        }
        Ok((params, at))
    }

    fn formal(&mut self, p: &Variable<'a>) -> Res<Argument> {
        if p.register {
            if p.ty == Ty::Pred {
                return self.unsupported("predicate parameters are not supported");
            }
            let slot = self.register(p.ty)?;
            self.declare(p.name, FunctionName::Register { slot, ty: p.ty })?;
            return Ok(if p.ty.bytes() == 8 { Argument::Wide(slot) } else { Argument::Narrow(slot) });
        }
        let (first, words) = self.words(p)?;
        Ok(Argument::Words(first, words))
    }

    /// Allocates storage of a `.param` variable in the frame.
    fn words(&mut self, p: &Variable<'a>) -> Res<(u32, u32)> {
        let Ok(bytes) = u32::try_from(p.size) else {
            return self.fail(format!("parameter {} is too large", p.name));
        };
        let words = bytes.div_ceil(4);
        let first = match words.checked_mul(UNITS) {
            Some(units) => self.slots(units)?,
            None => return self.fail(format!("parameter {} is too large", p.name)),
        };
        self.declare(p.name, FunctionName::Words { first, bytes })?;
        Ok((first, words))
    }

    fn collect_labels(&mut self, body: &[Statement<'a>]) -> Res<()> {
        let (mut stack, mut next) = (vec![0u32], 1u32);
        for statement in body {
            match statement {
                Statement::Open => {
                    stack.push(next);
                    next += 1;
                    if stack.len() > MAX_SCOPES {
                        return self.fail("blocks nested too deep");
                    }
                }
                Statement::Close => {
                    stack.pop();
                }
                Statement::Label(name, line) => {
                    let scope = stack.last().copied().unwrap_or(0);
                    let id = u32::try_from(self.label_at.len()).unwrap_or(u32::MAX);
                    self.label_at.push(u32::MAX);
                    if self.labels.insert((scope, name), id).is_some() {
                        self.line = *line;
                        return self.fail(format!("label {name} is defined twice"));
                    }
                }
                Statement::BranchTargets(name, targets) => {
                    self.branch_tables.insert(name, targets.clone());
                }
                Statement::CallPrototype(name, prototype) => {
                    self.prototypes.insert(name, prototype.clone());
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn label(&self, name: &str) -> Option<u32> {
        self.scopes.iter().rev().find_map(|(id, _)| self.labels.get(&(*id, name)).copied())
    }

    fn body(&mut self, body: &[Statement<'a>]) -> Res<()> {
        for statement in body {
            match statement {
                Statement::Open => {
                    let id = self.next_scope;
                    self.next_scope += 1;
                    self.scopes.push((id, HashMap::new()));
                }
                Statement::Close => {
                    self.scopes.pop();
                }
                Statement::Registers { ty, vector, names, line } if *vector != 1 => {
                    self.line = *line;
                    self.vectors(*ty, *vector, names)?;
                }
                Statement::Registers { ty, names, line, .. } => {
                    self.line = *line;
                    for (name, count) in names {
                        let what = match count {
                            Some(count) => {
                                self.family += 1;
                                self.has_vectors |= *ty == Ty::B128;
                                FunctionName::Family { id: self.family, count: *count, ty: *ty }
                            }
                            None if *ty == Ty::B128 => self.register_of_128_bits()?,
                            None => FunctionName::Register { slot: self.register(*ty)?, ty: *ty },
                        };
                        self.declare(name, what)?;
                    }
                }
                Statement::Variable(v) => self.variable(v)?,
                Statement::Label(name, _) => {
                    let scope = self.scopes.last().map_or(0, |s| s.0);
                    if let Some(&id) = self.labels.get(&(scope, *name)) {
                        self.label_at[id as usize] = u32::try_from(self.code.insts.len()).unwrap_or(u32::MAX);
                    }
                }
                Statement::BranchTargets(..) | Statement::CallPrototype(..) => {}
                Statement::Instruction(inst) => {
                    self.line = inst.line;
                    self.guard = (NONE, false);
                    if let Some((name, negated)) = inst.guard {
                        let (slot, ty) = self.reg(name)?;
                        self.check(name, ty, Ty::Pred)?;
                        self.guard = (slot, negated);
                    }
                    let expanded = self.expanded(inst)?;
                    self.instruction(expanded.as_ref().unwrap_or(inst)).map_err(|mut e| {
                        if !e.message.starts_with("instruction ") {
                            e.message = format!("instruction {}: {}", spelled(inst), e.message);
                        }
                        e
                    })?;
                }
            }
        }
        Ok(())
    }

    fn variable(&mut self, v: &Variable<'a>) -> Res<()> {
        self.line = v.line;
        match v.space {
            Space::Local => {
                let size = u32::try_from(v.size).ok().filter(|&s| s <= 1 << 19);
                let Some(size) = size else {
                    return self.fail(format!("local variable {} is too large", v.name));
                };
                let at = self.code.local_bytes.next_multiple_of(v.align.max(1));
                if at + size > 1 << 19 {
                    return self.fail("too much local memory");
                }
                self.code.local_bytes = at + size;
                self.declare(v.name, FunctionName::Local(at))?;
            }
            Space::Shared if v.external => self.declare(v.name, FunctionName::Dynamic)?,
            Space::Shared => {
                let at = self.shared.declared(v)?;
                self.declare(v.name, FunctionName::Shared(at))?;
            }
            Space::Param => {
                self.words(v)?;
            }
            _ => match self.symbols.nested.get(&(v.line, v.name)) {
                Some(index) => self.declare(v.name, FunctionName::Global(*index))?,
                None => return self.fail(format!("{} is not in a space of functions", v.name)),
            },
        }
        Ok(())
    }

    /// Resolves labels and closes the code.
    fn finish(&mut self) -> Res<()> {
        // The end of the body is a return.
        self.guard = (NONE, false);
        let op = if self.entry { Op::Exit } else { Op::Ret };
        let last = self.inst(op, Ty::B32);
        self.emit(last);
        let index = propagate::constants(&mut self.code);
        let moved = |at: u32| index.get(at as usize).copied().unwrap_or(u32::MAX);
        for at in &mut self.label_at {
            *at = moved(*at);
        }
        for (at, ..) in &mut self.fixups {
            *at = index.get(*at).copied().unwrap_or(0) as usize;
        }
        for (at, id, name) in core::mem::take(&mut self.fixups) {
            let target = self.label_at[id as usize];
            let inst = &mut self.code.insts[at];
            if target == u32::MAX {
                return Err(LoadError {
                    kind: LoadErrorKind::Syntax,
                    line: inst.line,
                    message: format!("label {name} is not defined"),
                });
            }
            inst.imm = i64::from(target);
            if target as usize <= at {
                inst.flags |= flag::BACKWARD;
            }
        }
        let label_at = &self.label_at;
        for table in &mut self.code.tables {
            for target in table {
                *target = label_at[*target as usize];
                if *target == u32::MAX {
                    return self.fail("a branch target is not defined");
                }
            }
        }
        self.line = 0;
        Ok(())
    }

    fn instruction(&mut self, inst: &Instruction<'a>) -> Res<()> {
        requirements::check(self.symbols.language, inst).or_else(|why| self.fail(why))?;
        grammar::check(inst).or_else(|why| self.fail(why))?;
        if !requirements::is_executed(inst) {
            return self.unsupported("not supported by this device");
        }
        let mut m = Modifiers::parse(&inst.modifiers);
        let done = self.data(inst, &mut m)?
            || self.control(inst, &mut m)?
            || self.matrix(inst, &mut m)?
            || self.image(inst, &mut m)?;
        if !done {
            const KNOWN: &[&str] = &[
                "wgmma",
                "tcgen05",
                "multimem",
                "tensormap",
                "clusterlaunchcontrol",
                "mapa",
                "getctarank",
                "vote_",
                "movmatrix",
                "st_async",
                "red_async",
                "cp_",
                "vset2",
                "vset4",
            ];
            return if KNOWN.contains(&inst.opcode) {
                self.unsupported("not supported by this device")
            } else {
                self.fail("unknown instruction")
            };
        }
        if let Some(word) = m.other.first() {
            return self.fail(format!("modifier .{word} is not valid here"));
        }
        Ok(())
    }

    fn operands<'o, const N: usize>(&self, inst: &'o Instruction<'a>) -> Res<[&'o Operand<'a>; N]> {
        let mut iter = inst.operands.iter();
        let out = core::array::from_fn(|_| iter.next());
        if inst.operands.len() != N || out.iter().any(Option::is_none) {
            return self.fail(format!("takes {N} operands, has {}", inst.operands.len()));
        }
        // All operands are present.
        Ok(out.map(|o| o.unwrap_or(&inst.operands[0])))
    }

    /// Generic address of local memory and of parameters, for `cvta`.
    fn window(space: Space) -> u64 {
        match space {
            Space::Shared => SHARED_WINDOW.start,
            Space::Local => LOCAL_WINDOW.start,
            Space::Param => PARAM_WINDOW,
            _ => 0,
        }
    }
}

/// The opcode with its modifiers.
fn spelled(inst: &Instruction<'_>) -> String {
    let mut s = inst.opcode.to_owned();
    for m in &inst.modifiers {
        s.push('.');
        s.push_str(m);
    }
    s
}
