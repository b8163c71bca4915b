//! Algebra of motifs: parallel and sequential composition.

use crate::motif::Motif;
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
