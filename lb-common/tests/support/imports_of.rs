//! Lists the items that a `use` declaration imports.

use syn::{Ident, UseTree};

/// The name and the path of each item that a `use` tree imports. A glob has no name, and the path of its module.
pub(crate) fn imports_of(tree: &UseTree) -> Vec<(Option<String>, Vec<String>)> {
    let mut found = Vec::new();
    add(&[], tree, &mut found);
    found
}

fn add(prefix: &[String], tree: &UseTree, found: &mut Vec<(Option<String>, Vec<String>)>) {
    let with = |name: &Ident| [prefix, &[name.to_string()]].concat();
    match tree {
        UseTree::Path(path) => add(&with(&path.ident), &path.tree, found),
        UseTree::Group(group) => group.items.iter().for_each(|tree| add(prefix, tree, found)),
        UseTree::Name(name) if name.ident == "self" => found.push((prefix.last().cloned(), prefix.to_vec())),
        UseTree::Name(name) => found.push((Some(name.ident.to_string()), with(&name.ident))),
        UseTree::Rename(name) => found.push((Some(name.rename.to_string()), with(&name.ident))),
        UseTree::Glob(_) => found.push((None, prefix.to_vec())),
    }
}
