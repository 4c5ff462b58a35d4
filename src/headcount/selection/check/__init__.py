"""Before any training: can instances be learned from the labels of these bags?"""
