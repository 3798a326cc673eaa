//! The grammar. One token of look-ahead; no recursion except in constant expressions, whose depth is bounded.

mod body;
mod constant;
mod initialiser;
mod reference;

use super::lex::{Tok, Token, tokens};
use super::tree::{Function, Language, Space, Tree, Ty, Variable};
use crate::api::{LoadError, LoadErrorKind};

/// The newest supported ISA version, times ten.
pub const NEWEST_ISA: u64 = 95;
/// Maximum nesting of constant expressions and initialisers.
const MAX_DEPTH: u32 = 32;
/// Maximum size of a variable with an initialiser, in bytes.
const MAX_INITIALISED: u64 = 1 << 28;

type Res<T> = Result<T, LoadError>;

/// The linking directives before a definition or declaration.
#[derive(Clone, Copy, Default)]
struct Linkage {
    external: bool,
    visible: bool,
    weak: bool,
}

struct Parser<'a> {
    tokens: Vec<Token<'a>>,
    pos: usize,
}

/// Parses a module and checks its version and target.
pub(crate) fn parse(src: &[u8], max_sm: u32) -> Res<Tree<'_>> {
    let mut parser = Parser { tokens: tokens(src)?, pos: 0 };
    parser.module(max_sm)
}

impl<'a> Parser<'a> {
    fn peek(&self) -> Tok<'a> {
        self.tokens[self.pos].kind
    }

    fn peek_at(&self, ahead: usize) -> Tok<'a> {
        self.tokens.get(self.pos + ahead).map_or(Tok::Eof, |t| t.kind)
    }

    fn line(&self) -> u32 {
        self.tokens[self.pos].line
    }

    fn next(&mut self) -> Tok<'a> {
        let tok = self.tokens[self.pos].kind;
        if self.pos + 1 < self.tokens.len() {
            self.pos += 1;
        }
        tok
    }

    fn fail<T>(&self, message: impl Into<String>) -> Res<T> {
        Err(LoadError { kind: LoadErrorKind::Syntax, line: self.line(), message: message.into() })
    }

    fn unexpected<T>(&self, wanted: &str) -> Res<T> {
        self.fail(format!("expected {wanted}, found {:?}", self.peek()))
    }

    fn eat(&mut self, c: u8) -> bool {
        let hit = self.peek() == Tok::Punct(c);
        if hit {
            self.next();
        }
        hit
    }

    fn eat_dot(&mut self, name: &str) -> bool {
        let hit = self.peek() == Tok::Dot(name);
        if hit {
            self.next();
        }
        hit
    }

    fn expect(&mut self, c: u8) -> Res<()> {
        if self.eat(c) { Ok(()) } else { self.unexpected(&format!("'{}'", c as char)) }
    }

    fn ident(&mut self) -> Res<&'a str> {
        match self.peek() {
            Tok::Ident(name) => {
                self.next();
                Ok(name)
            }
            _ => self.unexpected("a name"),
        }
    }

    fn small(&mut self) -> Res<u32> {
        let value = self.constant(0)?;
        u32::try_from(value).or_else(|_| self.fail("number out of range"))
    }

    // ---- module level ----

    fn module(&mut self, max_sm: u32) -> Res<Tree<'a>> {
        let mut tree = Tree {
            language: Language::default(),
            variables: Vec::new(),
            functions: Vec::new(),
            references: Vec::new(),
            aliases: Vec::new(),
        };
        let mut seen = (false, false);
        loop {
            match self.peek() {
                Tok::Eof => break,
                Tok::Dot("version") => {
                    self.next();
                    tree.language.isa = self.version()?;
                    seen.0 = true;
                }
                _ if !seen.0 => return self.fail("a module starts with .version"),
                Tok::Dot("target") => {
                    self.next();
                    (tree.language.target, tree.language.suffix) = self.target(max_sm)?;
                    seen.1 = true;
                }
                _ if !seen.1 => return self.fail(".target is missing"),
                Tok::Dot("address_size") => {
                    self.next();
                    if self.next() != Tok::Int(64) {
                        return self.fail("only 64-bit addresses exist");
                    }
                }
                Tok::Dot("file" | "loc") => self.skip_line(),
                Tok::Dot("section") => self.section()?,
                Tok::Dot("pragma") => {
                    self.skip_to_semicolon()?;
                }
                Tok::Dot("alias") => {
                    let line = self.line();
                    self.next();
                    let name = self.ident()?;
                    self.expect(b',')?;
                    let target = self.ident()?;
                    self.expect(b';')?;
                    tree.aliases.push((name, target, line));
                }
                Tok::Punct(b';') => {
                    self.next();
                }
                Tok::Dot(_) => self.definition(&mut tree)?,
                // Some compilers write debug information as `@@DWARF` lines.
                Tok::Punct(b'@') => self.skip_line(),
                _ => return self.unexpected("a directive"),
            }
        }
        if !seen.1 {
            return self.fail(".version or .target is missing");
        }
        Ok(tree)
    }

    /// Parses a version, times ten.
    fn version(&mut self) -> Res<u32> {
        let tenths = match self.peek() {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "saturates, compared below"
            )]
            Tok::F64(bits) => (f64::from_bits(bits) * 10.0).round() as u64,
            Tok::Int(major) => major.saturating_mul(10),
            _ => return self.unexpected("a version"),
        };
        if tenths > NEWEST_ISA {
            return Err(LoadError {
                kind: LoadErrorKind::Version,
                line: self.line(),
                message: format!(".version {}.{} is newer than 9.5", tenths / 10, tenths % 10),
            });
        }
        self.next();
        Ok(u32::try_from(tenths).unwrap_or(u32::MAX))
    }

    /// Parses the targets. Those with a letter run on one architecture, or on one family.
    fn target(&mut self, max_sm: u32) -> Res<(u32, Option<char>)> {
        let mut target = (0, None);
        loop {
            let line = self.line();
            let name = self.ident()?;
            if let Some(number) = name.strip_prefix("sm_") {
                let refuse = |message: String| Err(LoadError { kind: LoadErrorKind::Target, line, message });
                let digits = number.trim_end_matches(['a', 'f']);
                let suffix = number.strip_prefix(digits).and_then(|letter| letter.chars().next());
                let Ok(sm) = digits.parse::<u32>() else {
                    return self.fail(format!("unknown target {name}"));
                };
                let runs = match suffix {
                    None => sm <= max_sm,
                    Some('f') => sm <= max_sm && sm / 10 == max_sm / 10,
                    Some(_) => sm == max_sm,
                };
                if !runs {
                    let why = if suffix.is_some() { "is not for" } else { "is above" };
                    return refuse(format!(".target {name} {why} sm_{max_sm}"));
                }
                target = (sm, suffix);
            } else if !matches!(name, "debug" | "texmode_unified" | "texmode_independent" | "map_f64_to_f32")
            {
                return self.fail(format!("unknown target {name}"));
            }
            if !self.eat(b',') {
                return Ok(target);
            }
        }
    }

    fn skip_line(&mut self) {
        let line = self.line();
        while self.line() == line && self.peek() != Tok::Eof {
            self.next();
        }
    }

    fn skip_to_semicolon(&mut self) -> Res<()> {
        while self.peek() != Tok::Eof {
            if self.next() == Tok::Punct(b';') {
                return Ok(());
            }
        }
        self.unexpected("';'")
    }

    fn section(&mut self) -> Res<()> {
        while self.peek() != Tok::Eof {
            if self.next() == Tok::Punct(b'{') {
                while self.peek() != Tok::Eof {
                    if self.next() == Tok::Punct(b'}') {
                        return Ok(());
                    }
                }
            }
        }
        self.unexpected("'}'")
    }

    fn definition(&mut self, tree: &mut Tree<'a>) -> Res<()> {
        let mut linkage = Linkage::default();
        match self.peek() {
            Tok::Dot("extern") => linkage.external = true,
            Tok::Dot("visible") => linkage.visible = true,
            Tok::Dot("weak" | "common") => (linkage.visible, linkage.weak) = (true, true),
            _ => {}
        }
        if linkage.external || linkage.visible {
            self.next();
        }
        match self.peek() {
            Tok::Dot("entry" | "func") => {
                let function = self.function(linkage)?;
                tree.functions.push(function);
                Ok(())
            }
            Tok::Dot("tex") => self.references(linkage, &mut tree.references),
            Tok::Dot("global") if reference::opaque(self.peek_at(1)) => {
                self.references(linkage, &mut tree.references)
            }
            Tok::Dot("global" | "const" | "shared") => self.variables(linkage, &mut tree.variables),
            _ => self.unexpected("a module-scope directive"),
        }
    }

    fn function(&mut self, linkage: Linkage) -> Res<Function<'a>> {
        let entry = self.next() == Tok::Dot("entry");
        let line = self.line();
        // `.attribute(...)` of functions has no effect here.
        self.attribute()?;
        let returns = if !entry && self.peek() == Tok::Punct(b'(') { self.params()? } else { Vec::new() };
        let name = self.ident()?;
        let params = if self.peek() == Tok::Punct(b'(') { self.params()? } else { Vec::new() };
        let mut f = Function {
            name,
            entry,
            visible: linkage.visible,
            weak: linkage.weak,
            returns,
            params,
            body: None,
            max_threads: None,
            required_block: None,
            max_registers: None,
            refusal: None,
            line,
        };
        loop {
            match self.peek() {
                Tok::Dot("maxntid") => {
                    self.next();
                    let d = self.triple()?;
                    f.max_threads = Some(d.iter().fold(1u32, |a, &b| a.saturating_mul(b)));
                }
                Tok::Dot("reqntid") => {
                    self.next();
                    f.required_block = Some(self.triple()?);
                }
                Tok::Dot("maxnreg") => {
                    self.next();
                    f.max_registers = Some(self.small()?);
                }
                Tok::Dot("minnctapersm" | "maxnctapersm") => {
                    self.next();
                    self.small()?;
                }
                Tok::Dot("noreturn") => {
                    self.next();
                }
                Tok::Dot("pragma") => self.skip_to_semicolon()?,
                Tok::Dot("abi_preserve" | "abi_preserve_control") => {
                    self.next();
                    self.small()?;
                }
                Tok::Dot(
                    name @ ("explicitcluster" | "reqnctapercluster" | "maxclusterrank" | "blocksareclusters"),
                ) => {
                    f.refusal.get_or_insert(LoadError {
                        kind: LoadErrorKind::Unsupported,
                        line: self.line(),
                        message: format!(".{name}: clusters do not exist on this device"),
                    });
                    self.next();
                    if matches!(self.peek(), Tok::Int(_)) {
                        self.triple()?;
                    }
                }
                _ => break,
            }
        }
        if self.eat(b';') {
            return Ok(f);
        }
        f.body = Some(self.body()?);
        Ok(f)
    }

    fn triple(&mut self) -> Res<[u32; 3]> {
        let mut d = [1u32; 3];
        for slot in &mut d {
            *slot = self.small()?;
            if !self.eat(b',') {
                break;
            }
        }
        Ok(d)
    }

    fn attribute(&mut self) -> Res<bool> {
        let mut managed = false;
        while self.eat_dot("attribute") {
            self.expect(b'(')?;
            let mut depth = 1;
            while depth > 0 {
                match self.next() {
                    Tok::Punct(b'(') => depth += 1,
                    Tok::Punct(b')') => depth -= 1,
                    Tok::Dot("managed") => managed = true,
                    Tok::Eof => return self.unexpected("')'"),
                    _ => {}
                }
            }
        }
        Ok(managed)
    }

    fn params(&mut self) -> Res<Vec<Variable<'a>>> {
        self.expect(b'(')?;
        let mut out = Vec::new();
        while !self.eat(b')') {
            let line = self.line();
            let register = match self.next() {
                Tok::Dot("param") => false,
                Tok::Dot("reg") => true,
                _ => return self.unexpected("a parameter"),
            };
            let (ty, align, vector) = self.type_and_align()?;
            if !register && matches!(ty, Ty::Pred | Ty::F16x2) {
                return self.fail("no parameter in memory has this type");
            }
            if register && vector != 1 {
                return self.unsupported("parameters in vector registers are not supported");
            }
            // `.ptr .global .align 16` describes the target of a pointer.
            if self.eat_dot("ptr") {
                while let Tok::Dot(word) = self.peek() {
                    self.next();
                    if word == "align" {
                        self.small()?;
                    }
                }
            }
            let name = match self.peek() {
                Tok::Ident(name) => {
                    self.next();
                    name
                }
                // A prototype may omit the names.
                Tok::Punct(b',' | b')') => "_",
                _ => return self.unexpected("a parameter name"),
            };
            let (size, _) = self.dimensions(ty, vector, true)?;
            out.push(Variable {
                name,
                space: Space::Param,
                ty,
                align,
                size,
                init: None,
                external: false,
                visible: false,
                weak: false,
                managed: false,
                register,
                line,
            });
            if !self.eat(b',') && self.peek() != Tok::Punct(b')') {
                return self.unexpected("',' or ')'");
            }
        }
        Ok(out)
    }

    fn type_and_align(&mut self) -> Res<(Ty, u32, u8)> {
        let (mut ty, mut align, mut vector) = (None, None, 1);
        loop {
            match self.peek() {
                Tok::Dot("align") => {
                    self.next();
                    let a = self.small()?;
                    if !a.is_power_of_two() || a > 1 << 20 {
                        return self.fail("an alignment is a power of two");
                    }
                    align = Some(a);
                    continue;
                }
                Tok::Dot("v2") => vector = 2,
                Tok::Dot("v4") => vector = 4,
                // A parameter of an opaque type is a handle.
                Tok::Dot("texref" | "surfref") if ty.is_none() => ty = Some(Ty::U64),
                Tok::Dot("samplerref") => return self.no_samplers(),
                Tok::Dot(name) if ty.is_none() && Ty::declared(name).is_some() => ty = Ty::declared(name),
                Tok::Dot("attribute") => {
                    return self.fail("misplaced .attribute");
                }
                _ => break,
            }
            self.next();
        }
        match ty {
            Some(Ty::Pred | Ty::B128) if vector != 1 => self.fail("no such vector type"),
            Some(ty) => Ok((ty, align.unwrap_or(ty.bytes() * u32::from(vector)), vector)),
            None => self.unexpected("a type"),
        }
    }

    /// Parses array dimensions, of which the elements of a vector are the last. Returns the size in bytes, and the lengths (0 for `[]`).
    fn dimensions(&mut self, ty: Ty, vector: u8, allow_open: bool) -> Res<(u64, Vec<u64>)> {
        let mut dims = Vec::new();
        while self.eat(b'[') {
            if self.eat(b']') {
                if !allow_open || !dims.is_empty() {
                    return self.fail("only the first dimension may be open");
                }
                dims.push(0);
                continue;
            }
            dims.push(u64::from(self.small()?));
            self.expect(b']')?;
            if dims.len() > MAX_DEPTH as usize {
                return self.fail("too many dimensions");
            }
        }
        if vector != 1 {
            dims.push(u64::from(vector));
        }
        let size = dims.iter().try_fold(u64::from(ty.bytes()), |a, &b| a.checked_mul(b));
        match size {
            Some(size) if size <= 1 << 40 => Ok((size, dims)),
            _ => self.fail("variable too large"),
        }
    }

    fn variables(&mut self, linkage: Linkage, out: &mut Vec<Variable<'a>>) -> Res<()> {
        let line = self.line();
        let space = match self.next() {
            Tok::Dot("global") => Space::Global,
            Tok::Dot("const") => Space::Const,
            Tok::Dot("shared") => Space::Shared,
            Tok::Dot("local") => Space::Local,
            Tok::Dot("param") => Space::Param,
            _ => return self.unexpected("a state space that can be declared"),
        };
        let managed = self.attribute()?;
        let (ty, align, vector) = self.type_and_align()?;
        if ty == Ty::Pred || ty == Ty::F16x2 && space == Space::Param {
            return self.fail("no variable of this space has this type");
        }
        loop {
            let name = self.ident()?;
            let (mut size, mut dims) = self.dimensions(ty, vector, true)?;
            let mut init = None;
            if self.eat(b'=') {
                if dims.is_empty() {
                    init = Some(vec![(0, self.init_value()?)]);
                } else {
                    let mut items = Vec::new();
                    let count = self.init_list(&dims, 0, 0, &mut items)?;
                    if dims[0] == 0 {
                        dims[0] = count;
                        size = dims
                            .iter()
                            .try_fold(u64::from(ty.bytes()), |a, &b| a.checked_mul(b))
                            .unwrap_or(u64::MAX);
                    }
                    init = Some(items);
                }
                if size > MAX_INITIALISED {
                    return self.fail("initialised variable too large");
                }
            }
            out.push(Variable {
                name,
                space,
                ty,
                align,
                size,
                init,
                external: linkage.external,
                visible: linkage.visible,
                weak: linkage.weak,
                managed,
                register: false,
                line,
            });
            if !self.eat(b',') {
                break;
            }
        }
        self.expect(b';')
    }

    /// Parses an optional `+ n` or `- n`.
    fn offset(&mut self) -> Res<i64> {
        if self.eat(b'+') {
            Ok(self.constant(0)?.cast_signed())
        } else if self.eat(b'-') {
            Ok(self.constant(0)?.cast_signed().wrapping_neg())
        } else {
            Ok(0)
        }
    }
}
