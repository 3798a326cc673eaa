//! The retains of primary contexts.

/// The holder of a primary context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retainer {
    /// The program, by its own calls.
    Program,
    /// A green context, for as long as it exists.
    GreenContext,
}

/// The retains of one primary context, by holder: a program can release only its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retains {
    program: u64,
    green_contexts: u64,
}

impl Retains {
    const fn of(&mut self, by: Retainer) -> &mut u64 {
        match by {
            Retainer::Program => &mut self.program,
            Retainer::GreenContext => &mut self.green_contexts,
        }
    }

    /// Adds a retain.
    pub const fn add(&mut self, by: Retainer) {
        let count = self.of(by);
        *count = count.saturating_add(1);
    }

    /// Takes a retain back; `false` if the holder has none.
    pub const fn remove(&mut self, by: Retainer) -> bool {
        let count = self.of(by);
        match count.checked_sub(1) {
            Some(left) => {
                *count = left;
                true
            }
            None => false,
        }
    }

    /// True if a holder has a retain.
    #[must_use]
    pub const fn is_held(self) -> bool {
        self.program > 0 || self.green_contexts > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promise: C136
    #[test]
    fn program_releases_only_its_own_retains() {
        let mut retains = Retains::default();
        assert!(!retains.is_held());
        retains.add(Retainer::GreenContext);
        assert!(!retains.remove(Retainer::Program), "it belongs to the green context");
        retains.add(Retainer::Program);
        assert!(retains.remove(Retainer::Program) && retains.is_held());
        assert!(retains.remove(Retainer::GreenContext) && !retains.is_held());
    }
}
