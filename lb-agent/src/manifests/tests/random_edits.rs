//! Tests that random sequences of edits have the same result as a fresh read of the final folder.

use proptest::prelude::*;

use super::{Content, Edit, Folder, edit, service_at, slice};

/// A random document out of few possible ones, so that conflicts are frequent: mostly a Service that requests one of
/// three addresses, or an EndpointSlice.
fn document() -> impl Strategy<Value = String> {
    let name = prop::sample::select(vec!["a", "b", "c"]);
    prop_oneof![
        4 => (name.clone(), 1..4_u8).prop_map(|(name, last)| service_at(name, &format!("10.96.0.{last}"))),
        3 => (name.clone(), name, 1..3_u8).prop_map(|(name, of, last)| slice(name, of, &format!("10.0.0.{last}"))),
        1 => Just("# nothing\n".to_owned()),
        1 => Just("apiVersion: apps/v1\nkind: Deployment\n".to_owned()),
    ]
}

fn file_edit() -> impl Strategy<Value = Edit> {
    let content = prop_oneof![
        5 => prop::collection::vec(document(), 0..5).prop_map(|documents| Content::Text(documents.join("---\n"))),
        1 => Just(Content::Gone),
    ];
    (prop::sample::select(vec!["1.yaml", "2.yaml", "3.yaml"]), content)
        .prop_map(|(file, content)| edit(file, content))
}

/// Whether all conditions are about objects that two documents define. Any other condition would leave a last good
/// state in place, which a fresh read does not have.
fn problems_are_only_disputes(folder: &Folder) -> bool {
    folder.problems().iter().all(|problem| problem.contains("is defined already in"))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn edits_lead_to_the_state_of_a_fresh_load(batches in prop::collection::vec(prop::collection::vec(file_edit(), 1..4), 1..8)) {
        let mut edited = Folder::new();
        let mut files = std::collections::BTreeMap::new();
        for batch in &batches {
            // Keeps the last edit of each file: a batch must not contain two edits of the same file.
            let batch: std::collections::BTreeMap<_, _> = batch.iter().map(|edit| (edit.file.clone(), edit.clone())).collect();
            let batch: Vec<Edit> = batch.into_values().collect();
            edited.apply(&batch);
            for edit in batch {
                files.insert(edit.file.clone(), edit);
            }
        }
        let files: Vec<Edit> = files.into_values().collect();
        let mut fresh = Folder::new();
        fresh.apply(&files);
        if problems_are_only_disputes(&fresh) {
            prop_assert_eq!(edited.problems(), fresh.problems());
            prop_assert_eq!(&edited.services, &fresh.services);
        }
        prop_assert_eq!(&edited.slices, &fresh.slices);
        edited.apply(&files);
        prop_assert_eq!(&edited.update.changes, &[]);
    }

    #[test]
    fn file_that_breaks_and_is_mended_changes_nothing(
        files in prop::collection::vec(file_edit(), 1..4), cut in 0..400_usize, garbage in "[\\[{\t:*&%@`\"'|>-]{0,5}",
    ) {
        let mut folder = Folder::new();
        folder.apply(&files);
        let (services, slices, problems) = (folder.services.clone(), folder.slices.clone(), folder.problems());
        for edit in &files {
            if let Content::Text(text) = &edit.content {
                let (head, tail) = text.split_at(cut.min(text.len()));
                folder.apply(&[super::edit(edit.file.to_str().unwrap(), Content::Text(format!("{head}{garbage}{tail}")))]);
            }
        }
        folder.apply(&files);
        if problems.is_empty() && folder.problems().is_empty() {
            prop_assert_eq!(&folder.slices, &slices);
            prop_assert_eq!(folder.services.keys().collect::<Vec<_>>(), services.keys().collect::<Vec<_>>());
        }
    }
}
