//! Algebra of motifs: parallel and sequential composition.

use crate::motif::{Motif, Pattern};
use ir::Collective;

/// How a collective is decomposed into motifs.
///
/// Source: SYNDICATE §4.2.1 (parallel and sequential execution of motifs).
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Form {
    /// A single motif.
    Motif(Motif),
    /// Parallel composition: in any order, or concurrently.
    Beside(Vec<Form>),
    /// Sequential composition: one after the other.
    Then(Vec<Form>),
}

/// A motif and its dependencies.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OrderedMotif {
    /// The motif.
    pub motif: Motif,
    /// Motifs that must be done before it begins, by index; each is less than its own index.
    pub after: Vec<u32>,
}

impl Form {
    /// A collective as a single motif.
    pub fn of(collective: &Collective) -> Self {
        Form::Motif(Motif::of(collective))
    }

    /// Returns the form with each of its motifs replaced by a form.
    #[must_use]
    pub fn map(&self, change: impl Fn(&Motif) -> Form + Copy) -> Form {
        let all = |forms: &[Form]| forms.iter().map(|form| form.map(change)).collect();
        match self {
            Form::Motif(motif) => change(motif),
            Form::Beside(forms) => Form::Beside(all(forms)),
            Form::Then(forms) => Form::Then(all(forms)),
        }
    }

    /// Returns its motifs in dependency order, each with the motifs that it depends on.
    pub fn motifs(&self) -> Vec<OrderedMotif> {
        let mut motifs = Vec::new();
        self.collect(&[], &mut motifs);
        motifs
    }

    /// Appends its motifs, which depend on those in `after`; returns the motifs that must be done for
    /// the whole form to be done.
    fn collect(&self, after: &[u32], motifs: &mut Vec<OrderedMotif>) -> Vec<u32> {
        match self {
            Form::Motif(motif) => {
                motifs.push(OrderedMotif { motif: motif.clone(), after: after.to_vec() });
                vec![motifs.len() as u32 - 1]
            }
            Form::Beside(forms) if forms.is_empty() => after.to_vec(),
            Form::Beside(forms) => {
                forms.iter().flat_map(|form| form.collect(after, motifs)).collect()
            }
            Form::Then(forms) => {
                let mut last = after.to_vec();
                for form in forms {
                    last = form.collect(&last, motifs);
                }
                last
            }
        }
    }
}

impl From<Motif> for Form {
    fn from(motif: Motif) -> Self {
        Form::Motif(motif)
    }
}

/// Operators. A motif to which an operator does not apply is returned unchanged.
impl Motif {
    /// Splits the payload into `parts` segments, composed in parallel.
    pub fn segment(&self, parts: u64) -> Form {
        let one = |number: u64| {
            let mut motif = self.clone();
            match self.pattern {
                // Dependent motifs rely on which rank owns which block, so segment within blocks.
                Pattern::ReduceScatter
                | Pattern::AllGather
                | Pattern::ScatterDirect
                | Pattern::GatherDirect
                | Pattern::Exchange { .. } => motif.part = motif.part.part(number, parts),
                Pattern::AllReduce | Pattern::OneShot | Pattern::Reduce | Pattern::Broadcast => {
                    motif.area = motif.area.part(number, parts);
                }
                Pattern::Written => {}
            }
            Form::Motif(motif)
        };
        if parts <= 1 || self.pattern == Pattern::Written {
            return self.clone().into();
        }
        Form::Beside((0..parts).map(one).collect())
    }

    /// Splits an all-to-all, broadcast or reduction into splines of at most `most` peers, composed in
    /// parallel.
    pub fn spline(&self, most: u32) -> Form {
        let most = most.max(1);
        let parts: Vec<Form> = match self.pattern {
            Pattern::Exchange { first, count } if count > most => (0..count.div_ceil(most))
                .map(|part| {
                    let begin = part * most;
                    let count = most.min(count - begin);
                    let pattern = Pattern::Exchange { first: first + begin, count };
                    Form::Motif(Self { pattern, ..self.clone() })
                })
                .collect(),
            Pattern::Broadcast | Pattern::Reduce if self.group.len() - 1 > most as usize => {
                let root = self.group[0];
                let parts = self.group[1..].chunks(most as usize);
                parts
                    .map(|part| {
                        let group = std::iter::once(root).chain(part.iter().copied()).collect();
                        Form::Motif(Self { group, ..self.clone() })
                    })
                    .collect()
            }
            _ => return self.clone().into(),
        };
        Form::Beside(parts)
    }

    /// An all-reduce as a ring reduce-scatter, then a ring all-gather.
    pub fn ring(&self) -> Form {
        if self.pattern != Pattern::AllReduce {
            return self.clone().into();
        }
        let halves = [Pattern::ReduceScatter, Pattern::AllGather];
        Form::Then(halves.map(|pattern| Self { pattern, ..self.clone() }.into()).into())
    }

    /// A reduce-scatter or all-gather with every block sent straight to its target (direct exchange);
    /// an all-reduce as the one after the other (two-shot).
    pub fn direct(&self) -> Form {
        let halves: &[Pattern] = match self.pattern {
            Pattern::AllReduce => &[Pattern::ScatterDirect, Pattern::GatherDirect],
            Pattern::ReduceScatter => &[Pattern::ScatterDirect],
            Pattern::AllGather => &[Pattern::GatherDirect],
            _ => return self.clone().into(),
        };
        let forms = halves.iter().map(|&pattern| Self { pattern, ..self.clone() }.into());
        Form::Then(forms.collect())
    }

    /// An all-reduce in one round (one-shot). Ranks stage what they receive, so schedules reject
    /// transfers of more than `ASIDE_MAX` elements.
    pub fn one_shot(&self) -> Form {
        if self.pattern != Pattern::AllReduce {
            return self.clone().into();
        }
        Self { pattern: Pattern::OneShot, ..self.clone() }.into()
    }

    /// An all-reduce as reductions in groups of `width`, an all-reduce among the first members of
    /// groups, and broadcasts in the groups (tree).
    pub fn tree(&self, width: u32) -> Form {
        let width = width as usize;
        if self.pattern != Pattern::AllReduce || width < 2 || self.group.len() < 2 {
            return self.clone().into();
        }
        let groups = || self.group.chunks(width);
        let each = |pattern| {
            let of = |group: &[u32]| Form::from(self.with(pattern, group.iter().copied()));
            let several = groups().filter(|group| group.len() > 1);
            Form::Beside(several.map(of).collect())
        };
        let mut forms = vec![each(Pattern::Reduce)];
        if groups().len() > 1 {
            forms.push(self.with(Pattern::AllReduce, groups().map(|group| group[0])).into());
        }
        forms.push(each(Pattern::Broadcast));
        Form::Then(forms)
    }

    /// Hierarchical all-reduce: ring reduce-scatters among `width` adjacent members, all-reduces of
    /// each block across these rings, and ring all-gathers. Unchanged if `width` does not divide the
    /// group.
    pub fn hierarchical(&self, width: u32) -> Form {
        let width = width as usize;
        let count = self.group.len();
        let fits = width > 1 && width < count && count.is_multiple_of(width);
        if self.pattern != Pattern::AllReduce || !fits {
            return self.clone().into();
        }
        let each = |pattern| {
            let of = |group: &[u32]| Form::from(self.with(pattern, group.iter().copied()));
            Form::Beside(self.group.chunks(width).map(of).collect())
        };
        let across = (0..width).map(|place| {
            let group = self.group.iter().copied().skip(place).step_by(width);
            let area = self.area.part(place as u64, width as u64);
            Form::from(Self { area, ..self.with(Pattern::AllReduce, group) })
        });
        let across = Form::Beside(across.collect());
        Form::Then(vec![each(Pattern::ReduceScatter), across, each(Pattern::AllGather)])
    }
}
