//! The load of a module: parses the text, resolves names and lowers each function.

use std::collections::{HashMap, HashSet};

use crate::api::{Global, Kernel, LoadError, LoadErrorKind};
use crate::ir::{LoweredCode, Op, Target, function_token};
use crate::lower::{self, Lower, Symbol, Symbols};
use crate::module::{Item, Module, Value, masked};
use crate::ptx::{self, Function, Init, Operand, Space, Statement, Ty, Variable};

impl Module {
    /// Parses and lowers PTX text, with or without a trailing NUL. `max_sm` is the device's capability times 10.
    ///
    /// # Errors
    /// An error in the text, with its line. A module that contains an instruction that the engine does not execute does not load.
    pub fn load(ptx: &[u8], max_sm: u32) -> Result<Module, LoadError> {
        let tree = ptx::parse(ptx, max_sm)?;
        let mut symbols = Symbols { names: HashMap::new(), signatures: Vec::new(), defined: HashSet::new() };
        let mut globals = Vec::new();
        let mut sources: Vec<&Variable<'_>> = Vec::new();
        let mut module_shared = 0u32;
        let twice = |name: &str, line: u32| LoadError {
            kind: LoadErrorKind::Syntax,
            line,
            message: format!("{name} is defined twice"),
        };
        for v in &tree.variables {
            match v.space {
                Space::Shared if v.external => {
                    symbols.names.insert(v.name, Symbol::Dynamic);
                }
                Space::Shared => {
                    let at = lower::place_shared(&mut module_shared, v)?;
                    symbols.names.insert(v.name, Symbol::Shared(at));
                }
                _ if v.external => {
                    symbols.names.entry(v.name).or_insert(Symbol::Undefined);
                }
                _ => {
                    let index = u32::try_from(globals.len()).unwrap_or(u32::MAX);
                    let old = symbols.names.insert(v.name, Symbol::Global(index));
                    if !matches!(old, None | Some(Symbol::Undefined)) {
                        return Err(twice(v.name, v.line));
                    }
                    globals.push(Global {
                        name: v.name.to_owned(),
                        size: v.size,
                        align: v.align,
                        constant: v.space == Space::Const,
                        initialised: v.init.is_some(),
                        managed: v.managed,
                        visible: v.visible,
                    });
                    sources.push(v);
                }
            }
        }
        // A definition replaces its declarations.
        let mut chosen: Vec<&Function<'_>> = Vec::new();
        for f in &tree.functions {
            match symbols.names.get(f.name) {
                Some(Symbol::Function(index)) => {
                    let at = &mut chosen[*index as usize];
                    if f.body.is_some() {
                        if at.body.is_some() {
                            return Err(twice(f.name, f.line));
                        }
                        *at = f;
                    }
                }
                Some(_) => return Err(twice(f.name, f.line)),
                None => {
                    let index = u32::try_from(chosen.len()).unwrap_or(u32::MAX);
                    symbols.names.insert(f.name, Symbol::Function(index));
                    chosen.push(f);
                }
            }
        }
        for (name, target, line) in &tree.aliases {
            let Some(Symbol::Function(index)) = symbols.names.get(target).copied() else {
                return Err(LoadError {
                    kind: LoadErrorKind::Link,
                    line: *line,
                    message: format!("alias of unknown {target}"),
                });
            };
            symbols.names.insert(name, Symbol::Function(index));
            symbols.defined.insert(name);
        }
        symbols.signatures = chosen.iter().map(|f| lower::signature(f)).collect();
        symbols.defined.extend(chosen.iter().filter(|f| f.body.is_some()).map(|f| f.name));

        let mut functions: Vec<LoweredCode> = chosen
            .iter()
            .map(|f| LoweredCode { name: f.name.to_owned(), ..LoweredCode::default() })
            .collect();
        let mut device_shared = module_shared;
        for (f, code) in chosen.iter().zip(&mut functions) {
            if !f.entry && f.body.is_some() {
                *code = Lower::function(f, &symbols, &mut device_shared)?.code;
            }
        }
        let mut kernels = Vec::new();
        for (index, f) in chosen.iter().enumerate() {
            if !f.entry {
                continue;
            }
            if f.body.is_none() {
                continue;
            }
            let (calls, shared) = mentions(f, &symbols);
            let mut next = if calls {
                device_shared
            } else if shared {
                module_shared
            } else {
                0
            };
            let lowered = Lower::function(f, &symbols, &mut next)?;
            let slots = lowered.code.frame_units / crate::regs::UNITS;
            kernels.push(Kernel {
                name: f.name.to_owned(),
                params: lowered.params,
                param_bytes: lowered.param_bytes,
                static_shared: next,
                local_bytes: lowered.code.local_bytes,
                max_threads: f
                    .required_block
                    .map_or(f.max_threads.unwrap_or(1024), |b| b.iter().product())
                    .min(1024),
                required_block: f.required_block,
                // Registers are in single-assignment form: about a third of them is live at once.
                registers: (slots / 3 + 8).clamp(16, 128),
                function: index,
            });
            functions[index] = lowered.code;
        }
        check_calls(&functions)?;
        let mut initial = Vec::new();
        for v in sources {
            initial.push(items(v, &symbols)?);
        }
        Ok(Module { kernels, globals, initial, functions })
    }
}

/// Returns whether a kernel calls functions, and whether it names shared variables of the module.
fn mentions(f: &Function<'_>, symbols: &Symbols<'_>) -> (bool, bool) {
    let (mut calls, mut shared) = (false, false);
    for statement in f.body.as_deref().unwrap_or(&[]) {
        let Statement::Instruction(i) = statement else { continue };
        calls |= i.opcode == "call";
        shared |= i.operands.iter().any(|o| {
            let name = match o {
                Operand::Name(name)
                | Operand::SymbolOffset(name, _)
                | Operand::Memory { base: Some(name), .. } => name,
                _ => return false,
            };
            matches!(symbols.names.get(name), Some(Symbol::Shared(_)))
        });
    }
    (calls, shared)
}

/// Checks that every function that is called by name is defined.
fn check_calls(functions: &[LoweredCode]) -> Result<(), LoadError> {
    for code in functions {
        for inst in code.insts.iter().filter(|i| i.op == Op::Call) {
            let site = usize::try_from(inst.imm).ok().and_then(|n| code.calls.get(n));
            if let Some(Target::Function(index)) = site.map(|s| s.target) {
                let callee = &functions[index as usize];
                if !callee.defined {
                    return Err(LoadError {
                        kind: LoadErrorKind::Link,
                        line: inst.line,
                        message: format!("function {} is called but not defined", callee.name),
                    });
                }
            }
        }
    }
    Ok(())
}

fn items(v: &Variable<'_>, symbols: &Symbols<'_>) -> Result<Vec<Item>, LoadError> {
    let size = v.ty.bytes();
    let fail = |message: String| LoadError { kind: LoadErrorKind::Link, line: v.line, message };
    let mut out = Vec::new();
    for (n, init) in v.init.as_deref().unwrap_or(&[]) {
        let value = match init {
            Init::Int(bits) => match v.ty {
                #[expect(
                    clippy::cast_precision_loss,
                    reason = "an integer in the place of a float is converted"
                )]
                Ty::F32 => Value::Bits(u64::from((bits.cast_signed() as f32).to_bits())),
                #[expect(
                    clippy::cast_precision_loss,
                    reason = "an integer in the place of a float is converted"
                )]
                Ty::F64 => Value::Bits((bits.cast_signed() as f64).to_bits()),
                _ => Value::Bits(*bits),
            },
            Init::F32(bits) if v.ty == Ty::F64 => Value::Bits(f64::from(f32::from_bits(*bits)).to_bits()),
            Init::F32(bits) => Value::Bits(u64::from(*bits)),
            #[expect(
                clippy::cast_possible_truncation,
                reason = "a constant is rounded to the type of the variable"
            )]
            Init::F64(bits) if v.ty == Ty::F32 => {
                Value::Bits(u64::from((f64::from_bits(*bits) as f32).to_bits()))
            }
            Init::F64(bits) => Value::Bits(*bits),
            Init::Symbol { name, offset, mask } => match symbols.names.get(name) {
                Some(Symbol::Global(index)) => {
                    Value::Global { index: *index as usize, offset: *offset, mask: *mask }
                }
                Some(Symbol::Function(index)) => {
                    Value::Bits(masked(function_token(*index as usize).wrapping_add_signed(*offset), *mask))
                }
                Some(Symbol::Shared(at)) => {
                    Value::Bits(masked(u64::from(*at).wrapping_add_signed(*offset), *mask))
                }
                _ => return Err(fail(format!("{name} in the initialiser of {} is not defined", v.name))),
            },
        };
        // A masked address fills one element of its own size; a whole one may be stored in an array of bytes.
        let width = match init {
            Init::Symbol { mask: None, .. } => 8.min(u32::try_from(v.size).unwrap_or(8)).max(size.min(8)),
            _ => size,
        };
        let offset = n.saturating_mul(u64::from(size));
        if size == 16 {
            return Err(fail(format!("the 128-bit initialiser of {} is not supported", v.name)));
        }
        out.push(Item {
            offset,
            size: if v.ty.bytes() == 8 {
                8
            } else if v.ty.bytes() == 4 {
                4
            } else {
                width.min(8)
            },
            value,
        });
    }
    Ok(out)
}
