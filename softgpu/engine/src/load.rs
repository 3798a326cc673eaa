//! The load of a module: parses its texts, resolves names and lowers each function.

use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use sluice_cuda_abi::occupancy::resident_threads;

use crate::api::{Global, Kernel, LoadError, LoadErrorKind};
use crate::exec::machine;
use crate::image::Reference;
use crate::ir::{LoweredCode, Op, Target, function_token};
use crate::lower::{self, Lower, Lowered, SharedLayout, SharedVariable, Symbol, Symbols};
use crate::module::{Item, Module, Value, masked};
use crate::ptx::{self, Function, Init, ReferenceDeclaration, Space, Statement, Tree, Ty, Variable};

/// A text of a link.
#[derive(Clone, Copy, Debug)]
pub struct SourceUnit<'a> {
    /// PTX, with or without a trailing NUL.
    pub text: &'a [u8],
    /// Limit on the registers of kernels that state none.
    pub max_registers: Option<u32>,
}

/// The index of a unit, and its error.
pub type SourceUnitError = (usize, LoadError);

/// A definition that other units may name.
struct Definition {
    unit: usize,
    weak: bool,
    symbol: Symbol,
}

/// A unit with the numbers of its symbols.
struct LinkedUnit<'t, 'a> {
    tree: &'t Tree<'a>,
    symbols: Symbols<'a>,
    /// The functions that are numbered here, which are its own.
    functions: Vec<(u32, &'t Function<'a>)>,
}

/// The symbols of all units.
#[derive(Default)]
struct Numbering<'t, 'a> {
    visible: HashMap<&'a str, Definition>,
    globals: Vec<Global>,
    references: Vec<Reference>,
    /// The unit and the declaration of each global.
    sources: Vec<(usize, &'t Variable<'a>)>,
    functions: Vec<&'t Function<'a>>,
    /// Number of the shared variables of all units.
    shared: u32,
}

impl Module {
    /// Lets the interpreter execute all code. By default, functions that are entered often get machine code.
    pub fn interpret(&self) {
        self.functions.iter().for_each(|code| code.machine.interpret());
    }

    /// Makes machine code of all functions now. Returns the number of sequences of instructions that got some: 0 on processors and
    /// systems where everything is interpreted.
    pub fn translate(&self) -> usize {
        self.functions.iter().map(|code| code.machine.translate(code, machine::translate)).sum()
    }

    /// Parses and lowers PTX text, with or without a trailing NUL. `max_sm` is the device's capability times 10.
    ///
    /// # Errors
    /// An error in the text, with its line. A kernel with an instruction that the engine does not execute is a part of the module
    /// that states its [`Kernel::refusal`].
    pub fn load(ptx: &[u8], max_sm: u32) -> Result<Module, LoadError> {
        let unit = SourceUnit { text: ptx, max_registers: None };
        Module::load_units(&[unit], max_sm).map_err(|(_, error)| error)
    }

    /// Checks that a text parses, without its names.
    ///
    /// # Errors
    /// An error in the text, with its line.
    pub fn check(ptx: &[u8], max_sm: u32) -> Result<(), LoadError> {
        ptx::parse(ptx, max_sm).map(drop)
    }

    /// Like [`Module::load`] for several texts. A declaration in one of them stands for the visible definition in another; names
    /// that are not visible are a unit's own. Of weak definitions the first counts, and a definition that is not weak before it.
    ///
    /// # Errors
    /// The first error, with the unit in which it is. A name that is defined twice, or used and not defined, is an error of the kind
    /// [`LoadErrorKind::Link`].
    pub fn load_units(units: &[SourceUnit<'_>], max_sm: u32) -> Result<Module, SourceUnitError> {
        let mut trees = Vec::new();
        for (unit, SourceUnit { text, .. }) in units.iter().enumerate() {
            trees.push(ptx::parse(text, max_sm).map_err(|error| (unit, error))?);
        }
        let mut numbering = Numbering::default();
        numbering.decide(&trees)?;
        let mut linked = Vec::new();
        for (unit, tree) in trees.iter().enumerate() {
            linked.push(numbering.number(unit, tree).map_err(|error| (unit, error))?);
        }
        let Numbering { visible, globals, references, sources, functions, .. } = numbering;
        let signatures: Rc<Vec<_>> = Rc::new(functions.iter().map(|f| lower::signature(f)).collect());
        for (unit, one) in linked.iter_mut().enumerate() {
            resolve(one, &visible, &functions).map_err(|error| (unit, error))?;
            one.symbols.signatures = Rc::clone(&signatures);
        }

        let mut lowered: Vec<LoweredCode> = functions
            .iter()
            .map(|f| LoweredCode { name: f.name.to_owned(), ..LoweredCode::default() })
            .collect();
        let mut refusals: Vec<Option<LoadError>> = functions.iter().map(|_| None).collect();
        // Functions have one layout of shared memory, since each of them may serve several kernels.
        let mut layout = SharedLayout::default();
        let mut shared = vec![0; functions.len()];
        for (unit, LinkedUnit { symbols, functions, .. }) in linked.iter().enumerate() {
            for (index, f) in functions.iter().filter(|(_, f)| !f.entry && f.body.is_some()) {
                let Lowered { code, refusal, .. } =
                    Lower::function(f, symbols, &mut layout).map_err(|error| (unit, error))?;
                shared[*index as usize] = layout.begin_function();
                lowered[*index as usize] = code;
                refusals[*index as usize] = refusal;
            }
        }
        let mut kernels = Vec::new();
        for (unit, LinkedUnit { symbols, functions, .. }) in linked.iter().enumerate() {
            for (index, f) in functions.iter().filter(|(_, f)| f.entry && f.body.is_some()) {
                // The calls of a kernel are known when it is lowered. Few of the functions have shared variables.
                let mut needed = 0;
                let (code, own) = loop {
                    let mut own = layout.for_kernel(needed);
                    let code = Lower::function(f, symbols, &mut own).map_err(|error| (unit, error))?;
                    let wanted = of_functions(&code.code, &lowered, &shared).unwrap_or(layout.bytes());
                    if wanted == needed {
                        break (code, own);
                    }
                    needed = wanted;
                };
                let limit = f.max_registers.or(units[unit].max_registers);
                kernels.push(kernel(f, *index as usize, &code, own.bytes(), limit, symbols.language.target));
                lowered[*index as usize] = code.code;
                refusals[*index as usize] = code.refusal;
            }
        }
        for (unit, LinkedUnit { functions, .. }) in linked.iter().enumerate() {
            for (index, _) in functions {
                check_calls(&lowered[*index as usize], &lowered, &refusals).map_err(|error| (unit, error))?;
            }
        }
        spread(&lowered, &mut refusals);
        for kernel in &mut kernels {
            kernel.refusal = refusals[kernel.function].take();
        }
        let mut initial = Vec::new();
        for (unit, v) in sources {
            initial.push(items(v, &linked[unit].symbols).map_err(|error| (unit, error))?);
        }
        Ok(Module { kernels, globals, references, initial, functions: lowered })
    }
}

/// Describes a lowered kernel.
fn kernel(
    f: &Function<'_>,
    function: usize,
    lowered: &Lowered,
    static_shared: u32,
    max_registers: Option<u32>,
    target: u32,
) -> Kernel {
    let slots = lowered.code.frame_units / crate::regs::UNITS;
    let max_threads =
        f.required_block.map_or(f.max_threads.unwrap_or(1024), |b| b.iter().product()).clamp(1, 1024);
    // Registers are in single-assignment form: about a third of them is live at once. As a compiler does, a block of the largest
    // size fits in a multiprocessor, unless the text allows a thread more registers.
    let most = f.max_registers.map_or((REGISTERS / max_threads / 8 * 8).min(128), |_| MOST_REGISTERS);
    let registers = (slots / 3 + 8).clamp(LEAST_REGISTERS, most);
    let registers = max_registers.map_or(registers, |limit| registers.min(limit.max(LEAST_REGISTERS)));
    let resident = resident_threads(REGISTERS, registers);
    Kernel {
        name: f.name.to_owned(),
        params: lowered.params.clone(),
        param_bytes: lowered.param_bytes,
        static_shared,
        local_bytes: lowered.code.local_bytes,
        max_threads: max_threads.min(resident),
        required_block: f.required_block,
        registers,
        target,
        refusal: None,
        function,
    }
}

/// The fewest and the most registers of a thread.
const LEAST_REGISTERS: u32 = 16;
const MOST_REGISTERS: u32 = 255;
/// Registers of a multiprocessor, the same for all capabilities.
const REGISTERS: u32 = 1 << 16;

fn twice(name: &str, line: u32) -> LoadError {
    LoadError { kind: LoadErrorKind::Syntax, line, message: format!("{name} is defined twice") }
}

impl<'t, 'a> Numbering<'t, 'a> {
    /// Decides which of the visible definitions of each name counts.
    fn decide(&mut self, trees: &'t [Tree<'a>]) -> Result<(), SourceUnitError> {
        for (unit, tree) in trees.iter().enumerate() {
            let of_variable = |v: &Variable<'a>| {
                let defines = v.visible && !v.external && v.space != Space::Shared;
                defines.then_some((v.name, v.weak, v.line))
            };
            let of_function =
                |f: &Function<'a>| (f.visible && f.body.is_some()).then_some((f.name, f.weak, f.line));
            let variables = tree.variables.iter().filter_map(of_variable);
            let of_reference =
                |r: &ReferenceDeclaration<'a>| (r.visible && !r.external).then_some((r.name, r.weak, r.line));
            let references = tree.references.iter().filter_map(of_reference);
            let functions = tree.functions.iter().filter_map(of_function);
            for (name, weak, line) in variables.chain(references).chain(functions) {
                match self.visible.get(name) {
                    // In one unit, the numbering finds it.
                    Some(known) if known.unit == unit => {}
                    Some(known) if !known.weak && !weak => {
                        let message = format!(
                            "multiple definition of {name}, which input {} defines first",
                            known.unit
                        );
                        return Err((unit, LoadError { kind: LoadErrorKind::Link, line, message }));
                    }
                    Some(known) if !known.weak || weak => {}
                    _ => {
                        self.visible.insert(name, Definition { unit, weak, symbol: Symbol::Undefined });
                    }
                }
            }
        }
        Ok(())
    }

    /// True if another unit's definition of the name counts.
    fn is_replaced(&self, unit: usize, name: &str, visible: bool) -> bool {
        visible && self.visible.get(name).is_some_and(|known| known.unit != unit)
    }

    /// Gives numbers to the definitions of a unit.
    fn number(&mut self, unit: usize, tree: &'t Tree<'a>) -> Result<LinkedUnit<'t, 'a>, LoadError> {
        let mut names: HashMap<&'a str, Symbol> = HashMap::new();
        for v in &tree.variables {
            match v.space {
                Space::Shared if v.external => {
                    names.insert(v.name, Symbol::Dynamic);
                }
                Space::Shared => {
                    let variable = SharedVariable { index: self.shared, bytes: v.size, align: v.align };
                    self.shared += 1;
                    if names.insert(v.name, Symbol::Shared(variable)).is_some() {
                        return Err(twice(v.name, v.line));
                    }
                }
                _ if v.external || self.is_replaced(unit, v.name, v.visible) => {
                    names.entry(v.name).or_insert(Symbol::Undefined);
                }
                _ => {
                    let symbol = Symbol::Global(count(&self.globals));
                    if !matches!(names.insert(v.name, symbol), None | Some(Symbol::Undefined)) {
                        return Err(twice(v.name, v.line));
                    }
                    self.defined(unit, v.name, v.visible, symbol);
                    self.place(unit, v);
                }
            }
        }
        for r in &tree.references {
            if r.external || self.is_replaced(unit, r.name, r.visible) {
                names.entry(r.name).or_insert(Symbol::Undefined);
                continue;
            }
            let symbol = Symbol::Reference(count(&self.references));
            if !matches!(names.insert(r.name, symbol), None | Some(Symbol::Undefined)) {
                return Err(twice(r.name, r.line));
            }
            self.defined(unit, r.name, r.visible, symbol);
            self.references.push(Reference { name: r.name.to_owned(), kind: r.kind, visible: r.visible });
        }
        // A definition replaces its declarations.
        let mut functions: Vec<(u32, &'t Function<'a>)> = Vec::new();
        let mut places: HashMap<&'a str, usize> = HashMap::new();
        for f in &tree.functions {
            if f.body.is_some() && self.is_replaced(unit, f.name, f.visible) {
                names.entry(f.name).or_insert(Symbol::Undefined);
                continue;
            }
            match (names.get(f.name), places.get(f.name)) {
                (Some(Symbol::Function(index)), Some(place)) => {
                    let (_, known) = &mut functions[*place];
                    if f.body.is_some() {
                        if known.body.is_some() {
                            return Err(twice(f.name, f.line));
                        }
                        *known = f;
                        self.functions[*index as usize] = f;
                        self.defined(unit, f.name, f.visible, Symbol::Function(*index));
                    }
                }
                (Some(Symbol::Undefined), _) if f.body.is_none() => {}
                (Some(_), _) => return Err(twice(f.name, f.line)),
                (None, _) => {
                    let index = count(&self.functions);
                    names.insert(f.name, Symbol::Function(index));
                    places.insert(f.name, functions.len());
                    functions.push((index, f));
                    self.functions.push(f);
                    if f.body.is_some() {
                        self.defined(unit, f.name, f.visible, Symbol::Function(index));
                    }
                }
            }
        }
        let mut nested = HashMap::new();
        for (_, f) in &functions {
            for statement in f.body.as_deref().unwrap_or(&[]) {
                let Statement::Variable(v) = statement else { continue };
                if matches!(v.space, Space::Global | Space::Const) {
                    nested.insert((v.line, v.name), count(&self.globals));
                    self.place(unit, v);
                }
            }
        }
        let (signatures, defined) = (Rc::default(), HashSet::new());
        let symbols = Symbols { language: tree.language, names, signatures, defined, nested };
        Ok(LinkedUnit { tree, symbols, functions })
    }

    /// Gives the next number to a variable.
    fn place(&mut self, unit: usize, v: &'t Variable<'a>) {
        self.globals.push(Global {
            name: v.name.to_owned(),
            size: v.size,
            align: v.align,
            constant: v.space == Space::Const,
            initialised: v.init.is_some(),
            managed: v.managed,
            visible: v.visible,
        });
        self.sources.push((unit, v));
    }

    /// Records the number of a visible definition.
    fn defined(&mut self, unit: usize, name: &str, visible: bool, symbol: Symbol) {
        if visible && let Some(known) = self.visible.get_mut(name).filter(|known| known.unit == unit) {
            known.symbol = symbol;
        }
    }
}

fn count<T>(list: &[T]) -> u32 {
    u32::try_from(list.len()).unwrap_or(u32::MAX)
}

/// Makes the declarations of a unit stand for the definitions of others, and adds its aliases.
fn resolve<'a>(
    unit: &mut LinkedUnit<'_, 'a>,
    visible: &HashMap<&'a str, Definition>,
    functions: &[&Function<'a>],
) -> Result<(), LoadError> {
    let Symbols { names, defined, .. } = &mut unit.symbols;
    for (name, symbol) in names.iter_mut() {
        let declared = match symbol {
            Symbol::Undefined => true,
            Symbol::Function(index) => functions.get(*index as usize).is_none_or(|f| f.body.is_none()),
            _ => false,
        };
        if declared && let Some(known) = visible.get(name) {
            *symbol = known.symbol;
        }
    }
    for (name, target, line) in &unit.tree.aliases {
        let Some(Symbol::Function(index)) = names.get(target).copied() else {
            return Err(LoadError {
                kind: LoadErrorKind::Link,
                line: *line,
                message: format!("alias of unknown {target}"),
            });
        };
        names.insert(name, Symbol::Function(index));
        defined.insert(name);
    }
    let has_body = |symbol: &Symbol| match symbol {
        Symbol::Function(index) => functions.get(*index as usize).is_some_and(|f| f.body.is_some()),
        _ => false,
    };
    defined.extend(names.iter().filter(|(_, symbol)| has_body(symbol)).map(|(name, _)| *name));
    Ok(())
}

/// The bytes of the layout of functions that the calls of a kernel need; `None` if it may call any function.
fn of_functions(kernel: &LoweredCode, functions: &[LoweredCode], shared: &[u32]) -> Option<u32> {
    let (mut found, mut left, mut needed) = (HashSet::new(), vec![kernel], 0);
    while let Some(code) = left.pop() {
        for call in &code.calls {
            match call.target {
                Target::Function(index) if found.insert(index) => {
                    needed = needed.max(shared[index as usize]);
                    left.push(&functions[index as usize]);
                }
                Target::Function(_) | Target::Builtin(_) => {}
                Target::Slot(_) => return None,
            }
        }
    }
    Some(needed)
}

/// Refuses the functions that call, by name, one that is refused.
fn spread(functions: &[LoweredCode], refusals: &mut [Option<LoadError>]) {
    let mut callers: Vec<Vec<(usize, u32)>> = functions.iter().map(|_| Vec::new()).collect();
    for (caller, code) in functions.iter().enumerate() {
        for inst in code.insts.iter().filter(|i| i.op == Op::Call) {
            let site = usize::try_from(inst.imm).ok().and_then(|n| code.calls.get(n));
            if let Some(Target::Function(index)) = site.map(|s| s.target) {
                callers[index as usize].push((caller, inst.line));
            }
        }
    }
    let mut found: Vec<usize> = (0..functions.len()).filter(|index| refusals[*index].is_some()).collect();
    while let Some(index) = found.pop() {
        let Some(why) = refusals[index].clone() else { continue };
        for (caller, line) in callers[index].iter().copied() {
            if refusals[caller].is_none() {
                let message = format!("calls {}, which is refused: {why}", functions[index].name);
                // The cause of a long chain is stated once, and a text cannot make it longer.
                let message = if message.len() > MAX_MESSAGE { why.message.clone() } else { message };
                refusals[caller] = Some(LoadError { kind: why.kind, line, message });
                found.push(caller);
            }
        }
    }
}

/// Maximum length of the reason for which a caller is refused.
const MAX_MESSAGE: usize = 512;

/// Checks that every function that is called by name is defined.
fn check_calls(
    code: &LoweredCode,
    functions: &[LoweredCode],
    refusals: &[Option<LoadError>],
) -> Result<(), LoadError> {
    for inst in code.insts.iter().filter(|i| i.op == Op::Call) {
        let site = usize::try_from(inst.imm).ok().and_then(|n| code.calls.get(n));
        if let Some(Target::Function(index)) = site.map(|s| s.target) {
            let callee = &functions[index as usize];
            if !callee.defined && refusals[index as usize].is_none() {
                return Err(LoadError {
                    kind: LoadErrorKind::Link,
                    line: inst.line,
                    message: format!("function {} is called but not defined", callee.name),
                });
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
